"""Files of prompts."""

import json
from pathlib import Path


def read_prompts(path: Path) -> dict[int, str]:
    """The prompts of a file, by the number of their line, from 1; empty lines are left out.

    Args:
        path: text, a prompt a line; or, if its name ends in `.jsonl`, a JSON string a line, or an object with
            a `prompt`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is not as said, or there is no prompt.
    """
    if not path.is_file():
        raise FileNotFoundError(f"prompts: {path}: no such file")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"prompts: {path} is not UTF-8 text: {error}") from None
    there = {number: line.removesuffix("\r") for number, line in enumerate(lines, 1) if line.strip()}
    if not there:
        raise ValueError(f"prompts: {path} holds no prompt")
    if path.suffix != ".jsonl":
        return there
    return {number: _prompt(line, f"prompts: {path}, line {number}") for number, line in there.items()}


def _prompt(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str):
        raise ValueError(f'{where}: needs a string, or an object with a string "prompt", got {line[:80]}')
    return prompt
