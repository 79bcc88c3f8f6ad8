import json

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from xla_attention.text import ByteTokenizer, load_tokenizer

TEXT = "héllo\n\t wörld 𝄞 \x00 def f():\r\n  return <x>"


@pytest.fixture
def bpe(tmp_path):
    """A byte-level BPE with Llama's habit of putting a token in front of a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["the cat and the dog and the hat"] * 5, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_bytes():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (257, 256)
    assert tokenizer.encode("hé") == [104, 195, 169]
    assert tokenizer.decode([104, 256, 195, 169]) == "hé"
    assert tokenizer.decode([104, 195]) == "h\N{REPLACEMENT CHARACTER}"


def test_saved_bytes_are_the_same_tokenizer_for_everyone(tmp_path):
    ours = ByteTokenizer()
    ours.save(tmp_path)
    again = load_tokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (again.vocab_size, again.eos_id) == (257, 256)
    assert theirs.eos_token_id == 256
    everything = "".join(map(chr, range(0x800))) + TEXT
    assert ours.encode(everything) == again.encode(everything) == theirs(everything)["input_ids"]
    assert again.decode(ours.encode(everything)) == everything
    for ids in ([195], [104, 256, 105], [240, 157, 132]):
        assert again.decode(ids) == ours.decode(ids)


def test_a_tokenizer_file(bpe):
    for source in (bpe, str(bpe), bpe.parent):
        tokenizer = load_tokenizer(source)
        ids = tokenizer.encode("the cat 𝄞")
        assert len(ids) < len("the cat 𝄞".encode())
        assert tokenizer.decode(ids) == "the cat 𝄞"
        assert tokenizer.encode("the cat 𝄞", special_tokens=True) == [0, *ids]
        assert tokenizer.decode([0, *ids, 1]) == "the cat 𝄞"
        assert tokenizer.eos_id == 1
        assert tokenizer.vocab_size == len(Tokenizer.from_file(str(bpe)).get_vocab())


@pytest.mark.parametrize("eos_token", ["<s>", {"content": "<s>", "lstrip": False}])
def test_the_config_beside_it_names_the_end_token(bpe, eos_token):
    bpe.with_name("tokenizer_config.json").write_text(json.dumps({"eos_token": eos_token}))
    assert load_tokenizer(bpe).eos_id == 0


def test_no_end_token(bpe):
    bpe.with_name("tokenizer_config.json").write_text(json.dumps({"eos_token": None}))
    assert load_tokenizer(bpe).eos_id is None


def test_save_and_load(bpe, tmp_path):
    first = load_tokenizer(bpe)
    (tmp_path / "saved").mkdir()
    first.save(tmp_path / "saved")
    second = load_tokenizer(tmp_path / "saved")
    assert second.encode(TEXT, special_tokens=True) == first.encode(TEXT, special_tokens=True)
    assert (second.eos_id, second.vocab_size) == (first.eos_id, first.vocab_size)


def test_mistakes(bpe, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere does not exist; give 'bytes'"):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"empty/tokenizer\.json does not exist"):
        load_tokenizer(tmp_path / "empty")
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ValueError, match=r"broken\.json is not a tokenizer\.json"):
        load_tokenizer(tmp_path / "broken.json")
    bpe.with_name("tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    with pytest.raises(ValueError, match="eos_token '<end>' is not in"):
        load_tokenizer(bpe)
    for tokenizer, wrong in ((ByteTokenizer(), 257), (ByteTokenizer(), -1)):
        with pytest.raises(ValueError, match=f"ids: {wrong} is not an id of this tokenizer"):
            tokenizer.decode([104, wrong])
