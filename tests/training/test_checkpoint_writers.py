"""Checkpoints written at the same time into the same folder: each is whole, and none is lost."""

from small import LLAMA
from spmd import run_spmd

MODEL = LLAMA | {"vocab_size": 264, "hidden_size": 64, "num_attention_heads": 4}
CHANGES = {"model": MODEL, "batch_size": 8, "data": {"train": ["{stdlib}/json/*.py"], "held_out": 0.0}}

# Each item takes long enough that the writers would meet; the first write says when it has begun.
SEVERAL_WRITERS = """
import dataclasses, threading, time
from pathlib import Path
import torch
import torch.distributed.checkpoint.filesystem as filesystem
from small import QUIET, config
from xla_attention.training.checkpoint import CheckpointFolder
from xla_attention.training.run import prepare
from xla_attention.training.sharded_state import FOLDER, named_tensors, read_whole

begun, write = threading.Event(), filesystem._write_item
def slowly(*args, **kwargs):
    begun.set()
    time.sleep(0.01)
    return write(*args, **kwargs)
filesystem._write_item = slowly

settings = config(Path(VARIABLES["folder"]), **VARIABLES["changes"], sharding={"strategy": "fsdp"},
                  checkpoint={"keep_last": 9})
run = prepare(settings, QUIET)
folder = run.checkpoints.folder
other = dataclasses.replace(run, checkpoints=CheckpointFolder(folder, 9, run.sharding))
run.state.step = 3
run.save(background=True)
assert begun.wait(60)
assert not (folder / "step-00000003").exists()
other.save(background=True)  # the same step, from another writer
run.save(background=True)  # and from the first again
run.state.step = 4
other.save(background=True)
assert not (folder / "step-00000004").exists()
run.checkpoints.remove_unfinished()  # as a run that starts does, and as each save does
run.state.step = 5
run.save()  # not in the background, by a writer that did not begin the one of step 4
for each in (run, other):
    each.checkpoints.wait()

now = {name: tensor.cpu() for name, tensor in named_tensors(run.state.model, run.state.optimizer).items()}
same = [
    all(torch.equal(value, now[name]) for name, value in read_whole(saved / FOLDER, now).items())
    for saved in run.checkpoints.all()
]
print(json.dumps([[saved.name for saved in run.checkpoints.all()], same, [*map(str, folder.glob(".*"))]]))
"""


def test_writers_of_one_folder_take_turns(tmp_path):
    names, same, left = run_spmd(SEVERAL_WRITERS, 2, folder=str(tmp_path), changes=CHANGES)
    assert names == ["step-00000003", "step-00000004", "step-00000005"]
    assert all(same) and not left


FAILS_AFTER_A_SAVE = """
import time
from pathlib import Path
import torch.distributed.checkpoint.filesystem as filesystem
from small import QUIET, config
from xla_attention.training import loop

write = filesystem._write_item
def slowly(*args, **kwargs):
    time.sleep(0.01)
    return write(*args, **kwargs)
filesystem._write_item = slowly
steps, train_step = [], loop.train_step
def fails(run):
    if len(steps) == 2:
        raise RuntimeError("as if the device were gone")
    steps.append(run.state.step)
    return train_step(run)
loop.train_step = fails

folder = Path(VARIABLES["folder"])
try:
    loop.train(config(folder, **VARIABLES["changes"], sharding={"strategy": "fsdp"},
                      checkpoint={"interval": 2}), QUIET)
except RuntimeError as error:
    print(json.dumps([str(error), sorted(place.name for place in (folder / "checkpoints").iterdir())]))
"""


def test_a_run_that_fails_ends_when_its_last_checkpoint_is_written(tmp_path):
    """Otherwise the next run in the same process would meet a writer that is none of its own."""
    error, found = run_spmd(FAILS_AFTER_A_SAVE, 2, folder=str(tmp_path), changes=CHANGES)
    assert error == "as if the device were gone" and found == ["step-00000002"]
