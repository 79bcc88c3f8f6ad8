import json
import random

import pytest
import torch
import torch_xla
import transformers
import typer
from torch_xla.debug import metrics
from typer.testing import CliRunner

from xla_attention.commands.generate import find_model_folder, generate_command
from xla_attention.generation import Engine, Request, Sampling, generate, stream_text
from xla_attention.generation.prompts import read_prompts
from xla_attention.models import LlamaConfig, build_model, load_model, save_model
from xla_attention.text import ByteTokenizer, load_tokenizer

GREEDY = Sampling(temperature=0)
PROMPT = list(b"def f(x):")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A LLaMA over bytes with weights large enough that its choices are not near ties."""
    config = LlamaConfig(
        vocab_size=272,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=160,
        initializer_range=0.2,
        eos_token_id=256,
    )
    path = tmp_path_factory.mktemp("run") / "model"
    save_model(build_model(config, seed=2), path, tokenizer=ByteTokenizer())
    return path


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


def tokens(model, prompt_ids=PROMPT, **arguments):
    return list(generate(model, prompt_ids, **({"max_new_tokens": 30, "sampling": GREEDY} | arguments)))


def test_greedy_tokens_are_those_of_transformers(folder, model):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = theirs.generate(
        torch.tensor([PROMPT]), max_new_tokens=30, min_new_tokens=30, do_sample=False, pad_token_id=0
    )
    assert tokens(model) == ids[0, len(PROMPT) :].tolist()
    assert len(set(tokens(model))) > 5


def test_xla_gives_the_same_tokens_from_three_graphs(model, folder, first_device):
    on_xla = load_model(folder).to(first_device)
    torch_xla.sync()
    before = metrics.metric_data("CompileTime")
    before = before[0] if before else 0
    # One makes the cache, one takes the prompt, filled up to 128 tokens, and one each of the others.
    prompt_ids = list(range(120))
    ids = tokens(on_xla, prompt_ids, max_new_tokens=40)
    assert metrics.metric_data("CompileTime")[0] - before == 3
    assert ids == tokens(model, prompt_ids, max_new_tokens=40)


def test_up_to_the_longest_sequence(model):
    assert len(tokens(model, max_new_tokens=160 - len(PROMPT))) == 160 - len(PROMPT)
    with pytest.raises(ValueError, match="max_new_tokens: 9 prompt tokens and 152 new ones make 161.* 160"):
        tokens(model, max_new_tokens=152)


def test_a_step_may_be_longer_than_a_sequence(model, folder, first_device):
    """150 tokens of a prompt are filled up to 256, though the model takes 160."""
    prompt_ids = list(range(150))
    expected = tokens(model, prompt_ids, max_new_tokens=3)
    assert tokens(load_model(folder).to(first_device), prompt_ids, max_new_tokens=3) == expected
    engine = Engine(model, max_seqs=200, max_tokens=200)
    completions = [engine.submit(Request((n,), 2)) for n in range(200)]
    list(engine.run())
    assert completions[7].tokens == tokens(model, [7], max_new_tokens=2)


def test_stops_before_a_stop_token(model):
    ids = tokens(model)
    stop = ids[10]
    assert tokens(model, stop_ids={stop}) == ids[: ids.index(stop)]


def test_only_ids_that_the_tokenizer_has(model):
    sampling = Sampling(temperature=50.0)
    assert max(tokens(model, sampling=sampling, max_new_tokens=100)) > 200
    assert max(tokens(model, sampling=sampling, max_new_tokens=100, vocab_size=64)) < 64


def test_the_seed_decides(model):
    def sample(seed):
        return tokens(model, sampling=Sampling(), seed=seed)

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_ids": []}, "prompt_ids: got none"),
        ({"prompt_ids": [272]}, "prompt_ids: 272 is not below the model's vocab_size=272"),
        ({"max_new_tokens": 0}, "max_new_tokens: got 0"),
        ({"vocab_size": 300}, "vocab_size: got 300, must be 1 to the model's 272"),
    ],
)
def test_arguments_out_of_range(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        # Raised by the call itself, before the first token is asked for.
        generate(model, **({"prompt_ids": PROMPT, "max_new_tokens": 3, "sampling": GREEDY} | arguments))


def test_text_comes_in_whole_characters():
    tokenizer = ByteTokenizer()
    pieces = list(stream_text(tokenizer, list(b"ab"), "hé𝄞!".encode()))
    assert pieces == ["h", "é", "𝄞", "!"]
    assert list(stream_text(tokenizer, list(b"ab"), "é".encode()[:1])) == ["\N{REPLACEMENT CHARACTER}"]
    assert list(stream_text(tokenizer, "é".encode()[:1], "é".encode()[1:])) == []


def test_pieces_make_the_text_whatever_the_bytes():
    """Invalid bytes, long runs without a whole character, and characters cut by the decoded window."""
    draw = random.Random(0)
    for _ in range(50):
        ids = list("".join(draw.choices("aé𝄞", k=20)).encode()) + draw.choices(range(257), k=20)
        draw.shuffle(ids) if draw.random() < 0.5 else None
        assert "".join(stream_text(ByteTokenizer(), [], ids)) == ByteTokenizer().decode(ids)


def test_a_stop_string_is_held_back_until_it_is_another_text():
    def pieces(text, *stop):
        return list(stream_text(ByteTokenizer(), [], text.encode(), stop))

    assert pieces("abcabd!", "abd") == ["abc"]
    assert pieces("xababc", "abc") == ["x", "ab"]
    assert pieces("ab", "abc") == ["ab"]
    assert pieces("one two", "two", "e t") == ["o", "n"]


class TestCommand:
    app = typer.Typer()
    app.command()(generate_command)

    def run(self, *arguments):
        return CliRunner().invoke(self.app, [str(argument) for argument in arguments])

    def test_writes_prompt_and_continuation(self, folder, model):
        result = self.run(folder, "--prompt", "def f(x):", "--max-new-tokens", 12, "--temperature", 0)
        ids = tokens(model, max_new_tokens=12, stop_ids={256}, vocab_size=257)
        assert result.exit_code == 0
        assert result.stdout == "def f(x):" + ByteTokenizer().decode(ids) + "\n"
        assert "in float32 on CPU" in result.stderr

    def test_an_empty_prompt_starts_a_text(self, folder):
        result = self.run(folder, "--prompt", "", "--max-new-tokens", 3, "--seed", 1)
        assert result.exit_code == 0

    def test_mistakes_are_errors(self, folder, tmp_path):
        assert "no such folder" in str(self.run(tmp_path / "gpt2", "--prompt", "a").exception)
        assert "top_p: got 2.0" in str(self.run(folder, "--prompt", "a", "--top-p", 2).exception)
        assert "no config.json" in str(self.run(tmp_path, "--prompt", "a").exception)
        assert "either --prompt TEXT or" in str(self.run(folder).exception)
        assert "either --prompt TEXT or" in str(
            self.run(folder, "--prompt", "a", "--prompts", tmp_path / "p").exception
        )
        assert "p.txt: no such file" in str(self.run(folder, "--prompts", tmp_path / "p.txt").exception)
        lines = tmp_path / "lines.txt"
        lines.write_text("short\n\n" + "long" * 30 + "\n")
        message = str(self.run(folder, "--prompts", lines, "--max-new-tokens", 50).exception)
        assert "lines.txt, line 3: max_new_tokens: 120 prompt tokens and 50 new ones make 170" in message

    def test_continues_a_file_in_its_order(self, folder, model, tmp_path):
        lines = tmp_path / "prompts.jsonl"
        written = ["def f(x):", "a\nb", "import os, sys, json"]
        lines.write_text(
            "\n".join([json.dumps(written[0]), *(json.dumps({"prompt": w}) for w in written[1:])])
        )
        result = self.run(folder, "--prompts", lines, "--max-new-tokens", 12, "--temperature", 0,
                          "--max-seqs", 2, "--max-tokens", 16, "--page-size", 8)  # fmt: skip
        assert result.exit_code == 0
        found = [json.loads(line) for line in result.stdout.splitlines()]
        assert [line["prompt"] for line in found] == written
        for line in found:
            ids = tokens(
                model, list(line["prompt"].encode()), max_new_tokens=12, stop_ids={256}, vocab_size=257
            )
            assert line["text"] == ByteTokenizer().decode(ids)
        # The cache, and lengths 8 and 16 of greedy batches; sampled ones are not needed.
        assert "3 graphs compiled, at most 5 ever are" in result.stderr
        assert "9 pages allocated, 9 freed" in result.stderr

    def test_a_stop_string_is_not_written(self, folder, model):
        ids = tokens(model, max_new_tokens=12, stop_ids={256}, vocab_size=257)
        text = ByteTokenizer().decode(ids)
        result = self.run(folder, "--prompt", "def f(x):", "--max-new-tokens", 12, "--temperature", 0,
                          "--stop", text[4:7], "--stop", "never there")  # fmt: skip
        assert result.stdout == "def f(x):" + text[: text.index(text[4:7])] + "\n"


def test_files_of_prompts(tmp_path):
    text, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_text('one\r\n\n"two" \n')
    assert read_prompts(text) == {1: "one", 3: '"two" '}
    lines.write_text('"one"\n{"prompt": "", "id": 3}\n')
    assert read_prompts(lines) == {1: "one", 2: ""}
    for wrong, message in (("{", "line 1 is not JSON"), ("[1]", "line 1: needs a string"), ("", "no prompt")):
        lines.write_text(wrong)
        with pytest.raises(ValueError, match=message):
            read_prompts(lines)
    text.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not UTF-8"):
        read_prompts(text)


def test_the_latest_checkpoint_of_a_run_is_found(tmp_path):
    for step in ("step-00000100", "step-00000200", ".step-00000300.tmp"):
        (tmp_path / "checkpoints" / step / "model").mkdir(parents=True)
        (tmp_path / "checkpoints" / step / "model" / "config.json").write_text("{}")
    newest = tmp_path / "checkpoints" / "step-00000200"
    assert find_model_folder(tmp_path) == find_model_folder(newest) == newest / "model"
    assert find_model_folder(newest / "model") == newest / "model"


def test_the_saved_tokenizer_is_the_one_that_was_given(folder):
    assert load_tokenizer(folder).encode("def f(x):") == PROMPT
