#!/bin/bash
# Trains on a pod slice of Cloud TPU VMs: the same command on every host, one process each.
#
#   PROJECT=... ZONE=us-west4-a NFS=10.0.0.2:/vol1 examples/pod_slice/gcloud.sh
#
# NFS is a Filestore share with the corpus and the tokenizer; checkpoints go there too.
set -euo pipefail
NAME=${NAME:-xla-attention}
TYPE=${TYPE:-v5litepod-16}
VERSION=${VERSION:-v2-alpha-tpuv5-lite}   # of the TPU VM's system; `gcloud compute tpus tpu-vm versions list`

everywhere() {
  gcloud compute tpus tpu-vm ssh "$NAME" --project="$PROJECT" --zone="$ZONE" --worker=all --command="$1"
}

gcloud compute tpus tpu-vm create "$NAME" --project="$PROJECT" --zone="$ZONE" \
  --accelerator-type="$TYPE" --version="$VERSION"
gcloud compute tpus tpu-vm scp --recurse . "$NAME":xla-attention --project="$PROJECT" --zone="$ZONE" --worker=all
everywhere "sudo apt-get update && sudo apt-get install -y nfs-common python3.11-venv &&
  sudo mkdir -p /shared && sudo mount $NFS /shared"
everywhere "python3.11 -m venv venv && venv/bin/pip install ./xla-attention"
everywhere "PJRT_DEVICE=TPU venv/bin/xla-attention train xla-attention/examples/pod_slice/train.yaml"
