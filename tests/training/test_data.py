"""Packing, order and splits of the training data."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xla_attention.text import load_tokenizer
from xla_attention.training.config import ConfigError, DataConfig
from xla_attention.training.data import (
    DataError,
    PackedTokens,
    as_batch,
    document_end,
    evaluation_batches,
    load_data,
    tokenize_files,
    training_batch,
)

BYTES = load_tokenizer("bytes")


def packed(count, seq_len=4):
    return PackedTokens(np.arange(count, dtype=np.uint16), seq_len, vocab_size=count, name="numbers")


def load(config, **changes):
    sizes = {"seq_len": 8, "batch_size": 2, "vocab_size": 257, "seed": 0} | changes
    return load_data(DataConfig(**config), BYTES, **sizes)


@pytest.fixture
def texts(tmp_path):
    for name in "abcdefgh":
        (tmp_path / f"{name}.txt").write_text(name * 100)
    return tmp_path


def test_documents_are_packed_end_to_end_with_the_end_of_text_between(tmp_path):
    files = [tmp_path / "a.txt", tmp_path / "empty.txt", tmp_path / "b.txt"]
    for file, text in zip(files, ["xy", "", "é"]):
        file.write_text(text, encoding="utf-8")
    end = BYTES.eos_id
    assert tokenize_files(files, BYTES).tolist() == [*b"xy", end, *"é".encode(), end]


@given(count=st.integers(2, 200), seq_len=st.integers(1, 9))
def test_each_token_is_a_target_once_an_epoch(count, seq_len):
    data = packed(count, seq_len)
    targets = data.take(range(data.blocks))[:, 1:] if data.blocks else np.empty(0)
    assert np.sort(targets, axis=None).tolist() == list(range(1, 1 + data.blocks * seq_len))
    assert count - 1 - data.blocks * seq_len < seq_len  # less than a block is left over


def test_targets_are_the_inputs_shifted_by_one():
    batch = training_batch(packed(100), batch_size=3, position=0, seed=0)
    assert batch.shape == (3, 5) and batch.dtype == np.int64
    assert (batch[:, 1:] == batch[:, :-1] + 1).all()


def test_documents_end_behind_their_end_of_text_and_the_next_begins_untold():
    """9 ends a document: it is a target and belongs to the document; what follows it is no target."""
    blocks = np.array([[1, 2, 9, 3, 9, 9, 4], [9, 1, 2, 3, 4, 5, 9]])
    batch = as_batch(blocks, end_id=9)
    np.testing.assert_array_equal(batch.input_ids, blocks[:, :-1])
    assert batch.segment_ids.tolist() == [[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]]
    assert batch.segment_ids.dtype == np.int32
    assert batch.labels.tolist() == [[2, 9, -100, 9, -100, -100], [-100, 2, 3, 4, 5, 9]]
    assert (batch.labels >= 0).sum() == 8


def test_documents_that_see_each_other_are_one():
    blocks = np.array([[1, 2, 9, 3]])
    batch = as_batch(blocks, end_id=None)
    assert batch.segment_ids is None and batch.labels.tolist() == [[2, 9, 3]]


def test_documents_are_masked_where_the_tokenizer_can_tell_them_apart():
    class Endless:
        eos_id = None

    def end(tokenizer, **given):
        return document_end(DataConfig(train=["x"], **given), tokenizer)

    assert end(BYTES) == end(BYTES, mask_documents=True) == 256
    assert end(BYTES, mask_documents=False) is None
    assert end(Endless) is None
    with pytest.raises(ConfigError, match=r"data\.mask_documents: the tokenizer has no end-of-text id"):
        end(Endless, mask_documents=True)


def test_an_epoch_takes_every_block_once_in_an_order_set_by_seed_and_epoch():
    data = packed(81)  # 20 blocks

    def epoch(number, seed):
        batches = [
            training_batch(data, 5, position, seed) for position in range(20 * number, 20 * number + 20, 5)
        ]
        return np.concatenate(batches)[:, 0].tolist()

    first = epoch(0, seed=1)
    assert sorted(first) == list(range(0, 80, 4))
    assert first == epoch(0, seed=1)
    assert first != epoch(1, seed=1) and first != epoch(0, seed=2)


def test_a_batch_depends_on_its_position_alone():
    """What a resumed run relies on: no state is carried from batch to batch, over epoch ends too."""
    data = packed(29)  # 7 blocks, so batches of 3 straddle epochs
    in_order = [training_batch(data, 3, position, seed=0) for position in range(0, 30, 3)]
    for index in reversed(range(10)):
        np.testing.assert_array_equal(training_batch(data, 3, 3 * index, seed=0), in_order[index])
    np.testing.assert_array_equal(
        training_batch(data, 6, 3, seed=0), np.concatenate([in_order[1], in_order[2]])
    )


def test_evaluation_sees_the_same_spread_of_blocks_each_time():
    data = packed(401)  # 100 blocks
    once = np.concatenate(list(evaluation_batches(data, batch_size=5, batches=4)))
    again = np.concatenate(list(evaluation_batches(data, batch_size=5, batches=4)))
    np.testing.assert_array_equal(once, again)
    starts = once[:, 0] // 4
    assert len(set(starts)) == 20 and starts.min() == 0 and starts.max() == 99
    assert len(list(evaluation_batches(data, batch_size=5, batches=10**6))) == 20


def test_files_are_held_out_whole(texts):
    train, held_out = load({"train": [f"{texts}/*.txt"], "held_out": 0.25})
    seen, unseen = (set(np.unique(data.tokens)) - {BYTES.eos_id} for data in (train, held_out))
    assert len(seen) == 6 and len(unseen) == 2 and not seen & unseen
    other = load({"train": [f"{texts}/*.txt"], "held_out": 0.25}, seed=1)[1]
    assert set(np.unique(other.tokens)) != set(np.unique(held_out.tokens))


def test_the_end_of_a_single_file_is_held_out(texts):
    train, held_out = load({"train": [f"{texts}/a.txt"], "held_out": 0.3}, batch_size=1)
    assert (len(train.tokens), len(held_out.tokens)) == (71, 30)  # 100 letters and the end of the text


def test_held_out_files_can_be_named_or_left_out(texts):
    train, held_out = load({"train": [f"{texts}/a.txt"], "eval": [f"{texts}/b.txt"]})
    assert chr(train.tokens[0]) == "a" and chr(held_out.tokens[0]) == "b"
    assert load({"train": [f"{texts}/a.txt"], "held_out": 0})[1] is None


def test_excluded_files_are_left_out(texts):
    train, _ = load({"train": [f"{texts}/*.txt"], "exclude": ["*/[a-f].txt"], "held_out": 0.5})
    assert {chr(token) for token in train.tokens if token < 256} <= {"g", "h"}


def test_a_memmap_gives_what_the_text_gives(texts):
    tokens = tokenize_files([texts / "a.txt"], BYTES)
    tokens.tofile(texts / "a.bin")
    from_text = load({"train": [f"{texts}/a.txt"], "held_out": 0.3}, batch_size=1)
    from_file = load({"train": [f"{texts}/a.bin"], "held_out": 0.3}, batch_size=1)
    assert isinstance(from_file[0].tokens, np.memmap)
    for a, b in zip(from_text, from_file):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        assert a.fingerprint() == b.fingerprint()


def test_the_fingerprint_tells_data_apart(texts):
    prints = {
        load({"train": [f"{texts}/{name}.txt"], "held_out": 0}, seq_len=seq_len)[0].fingerprint()
        for name in "ab"
        for seq_len in (8, 9)
    }
    assert len(prints) == 4


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train": ["{here}/*.md"]}, r"data\.train: no file matches '.*\*\.md'"),
        ({"train": ["{here}/a.txt"], "eval": ["{here}/*.md"]}, r"data\.eval: no file matches"),
        ({"train": ["{here}/*.txt"], "exclude": ["*.txt"]}, r"data\.exclude leaves no file"),
        ({"train": ["{here}/empty"]}, r"no text: .*empty is empty"),
        ({"train": ["{here}/latin"]}, r"latin is not UTF-8 text .*data\.exclude"),
        (
            {"train": ["{here}/short"]},
            r"training data: .*make 0 blocks of seq_len 8.*give data\.train more text",
        ),
        ({"train": ["{here}/a.txt"]}, r"held-out data: .*raise data\.held_out, or lower batch_size"),
        ({"train": ["{here}/odd.bin"]}, r"odd\.bin: 3 bytes are not a row of uint16; check data\.dtype"),
        ({"train": ["{here}/odd.bin", "{here}/a.txt"]}, r"a \.bin file stands alone"),
    ],
)
def test_data_that_cannot_be_used_is_named(texts, data, message):
    (texts / "empty").touch()
    (texts / "short").write_text("abc")
    (texts / "latin").write_bytes("é".encode("latin-1"))
    (texts / "odd.bin").write_bytes(b"abc")
    data = {key: [pattern.replace("{here}", str(texts)) for pattern in value] for key, value in data.items()}
    with pytest.raises(DataError, match=message):
        load(data)


def test_ids_beyond_the_vocabulary_are_refused(texts):
    """XLA would clamp them in silence; a .bin of another integer type shows itself this way too."""
    np.full(100, 70000, np.uint32).tofile(texts / "large.bin")
    train, _ = load({"train": [f"{texts}/large.bin"], "dtype": "uint32", "held_out": 0})
    with pytest.raises(DataError, match=r"token id 70000 is not below the model's vocab_size 257"):
        training_batch(train, 2, 0, seed=0)
