"""The command `octavo`, in this process where that is enough, in one of its own where start-up is what is claimed."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from backends import BACKENDS
from typer.testing import CliRunner

from octavo.engine import LLM, SamplingParams
from octavo.engine.cli import app
from octavo.engine.cli_arguments import engine_arguments, parted
from octavo.engine.cli_tables import readable

PROMPT = "The capital of France is"
GREEDY = ["--temperature", "0", "--max-tokens", "8"]
SMALL = ["--max-model-len", "64", "--block-size", "8", "--no-enable-prefix-caching"]


def _run(*words: str, stdin: str | None = None):
    return CliRunner().invoke(app, list(words), input=stdin, prog_name="octavo")


def _assert_one_line_error(result, *words: str) -> None:
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


@pytest.fixture(scope="module", autouse=True)
def _shared_engines():
    """Loads an engine once for all commands that ask for the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("octavo.engine.llm.LLM", functools.cache(LLM))
        yield


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """What LLM.generate and LLM.chat make of PROMPT, as the command should."""
    llm, params = LLM("smollm2"), SamplingParams(temperature=0, max_tokens=8)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
    return {
        "text": llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text,
        "chat": llm.chat(chat, params, use_tqdm=False)[0].outputs[0].text,
    }


@pytest.mark.parametrize("backend", BACKENDS)
def test_generate_streams_the_text_of_the_api(backend, expected):
    result = _run("generate", "--prompt", PROMPT, "--backend", backend, *GREEDY)
    assert result.exit_code == 0, result.output
    assert result.stdout == expected["text"] + "\n"
    assert "Paris" in result.stdout


def test_generate_reads_a_prompt_from_a_pipe(expected):
    result = _run("generate", *GREEDY, stdin=PROMPT + "\n")
    assert result.stdout == expected["text"] + "\n"


def test_generate_wraps_prompts_in_a_chat(expected):
    result = _run("generate", "--chat", "--system", "Be brief.", "--prompt", PROMPT, *GREEDY)
    assert result.stdout == expected["chat"] + "\n"


def test_generate_prints_json_a_line_for_each_prompt(expected):
    result = _run("generate", "--json", "-p", PROMPT, "-p", "2 + 2 =", *GREEDY)
    first, second = map(json.loads, result.stdout.splitlines())
    assert (first["prompt"], second["prompt"]) == (PROMPT, "2 + 2 =")
    assert first["outputs"][0]["text"] == expected["text"]
    assert len(first["outputs"][0]["token_ids"]) == 8
    assert first["outputs"][0]["finish_reason"] == "length"


def test_generate_prints_samples_under_headings():
    result = _run("generate", "-p", PROMPT, "-n", "2", "--temperature", "1", "--seed", "1", "--max-tokens", "4")
    assert f"== {PROMPT} [0]\n" in result.stdout
    assert f"== {PROMPT} [1]\n" in result.stdout


def test_same_seed_gives_the_same_text():
    words = ["generate", "-p", PROMPT, "--temperature", "1", "--seed", "7", "--max-tokens", "6"]
    first, second = _run(*words).stdout, _run(*words).stdout
    assert first
    assert first == second


def test_generate_takes_engine_arguments(expected):
    result = _run("generate", "-p", PROMPT, *GREEDY, *SMALL)
    assert result.stdout == expected["text"] + "\n"


def test_chat_answers_resets_and_quits():
    lines = ["My name is Ada.", "/reset", "/nonsense", "", "Say hello.", "/quit", "never read"]
    result = _run("chat", *GREEDY, stdin="\n".join(lines))
    assert result.exit_code == 0, result.output
    assert "unknown command /nonsense" in result.stderr
    answers = result.stdout.splitlines()
    alone = _run("chat", *GREEDY, stdin="Say hello.\n").stdout
    assert alone.strip()
    assert result.stdout.endswith(alone), answers


def test_chat_remembers_what_was_said():
    told = _run("chat", *GREEDY, stdin="My name is Ada.\nWhat is my name?\n").stdout.splitlines()
    assert told[1:] != _run("chat", *GREEDY, stdin="What is my name?\n").stdout.splitlines()


def test_chat_goes_on_after_a_message_that_does_not_fit():
    long = "word " * 300
    result = _run("chat", *GREEDY, *SMALL, stdin=f"{long}\nSay hello.\n")
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("error: ")
    assert "64" in result.stderr
    assert result.stdout.strip()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["generate", "-p", "x", "--model", "no/such/model.gguf"], ["no/such/model.gguf"]),
        (["generate", "-p", "x", "--backend", "tensorflow"], ["tensorflow"]),
        (["generate", "-p", "x", "--block-size", "12"], ["block_size", "12"]),
        (["generate", "-p", "x", "--max-model-length", "12"], ["max_model_length", "max_model_len"]),
        (["generate", "-p", "x", "--pipeline-parallel-size", "0"], ["pipeline_parallel_size"]),
        (["generate", "-p", "x", "--top-p", "2"], ["top_p", "2"]),
        (["generate", "-p", "x", "--system", "y"], ["--system", "--chat"]),
        (["generate", "-p", "x", "stray"], ["stray"]),
        (["generate", "-p", ""], ["prompt"]),
        (["models", "inspect", "no/such/folder"], ["no/such/folder"]),
        (["plan", "--max-model-len", "999999999"], ["999999999"]),
        (["plan", "one", "--model", "two"], ["'one'", "'two'"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_errors_are_one_line_without_a_traceback(words, named):
    _assert_one_line_error(_run(*words), *named)


def test_debug_lets_the_error_through():
    result = _run("generate", "-p", "x", "--block-size", "12", "--debug")
    assert isinstance(result.exception, ValueError)


def test_models_list_names_the_embedded_one():
    listed = json.loads(_run("models", "list", "--json").stdout)
    assert "smollm2" in [entry["name"] for entry in listed]
    assert "smollm2" in _run("models", "list").stdout


def test_models_pull_prints_a_path():
    result = _run("models", "pull", "smollm2")
    assert Path(result.stdout.strip()).exists()


def test_models_inspect_shows_architecture_and_tensors():
    found = json.loads(_run("models", "inspect", "smollm2", "--json").stdout)
    assert "LlamaForCausalLM" in json.dumps(found)
    assert "Llama" in _run("models", "inspect", "smollm2").stdout


def test_plan_shows_memory_before_it_is_allocated():
    plan = json.loads(_run("plan", "--json", "--max-model-len", "512").stdout)
    parts = [plan[f"{part}_bytes"] for part in ("weights", "rows", "cache", "activations")]
    assert all(part > 0 for part in parts)
    assert sum(parts) == plan["total_bytes"]
    assert plan["groups"][0]["num_blocks"] > 1
    assert plan["largest_max_model_len"] >= plan["max_model_len"] == 512
    text = _run("plan", "--max-model-len", "512").stdout
    for words in ("weights bytes", "rows bytes", "cache bytes", "activations bytes", "num blocks", "MiB"):
        assert words in text


@pytest.mark.parametrize("backend", BACKENDS)
def test_plan_for_a_gpu_says_what_it_cannot_count(backend):
    """On stderr, so that the plan stays JSON."""
    words = ("plan", "--json", "--max-model-len", "512", "--backend", backend)
    result = _run(*words, "--device", "cuda")
    assert json.loads(result.stdout)["weights_bytes"] > 0
    assert result.stderr.startswith("not counted") and result.stderr.count("\n") == 1
    assert ("copies of weights" in result.stderr) == (backend == "torch")
    assert _run(*words).stderr == ""


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ([], {}),
        (["--max-model-len", "2048"], {"max_model_len": 2048}),
        (["--max-model-len=2k"], {"max_model_len": "2k"}),
        (["--enforce-eager", "--dtype", "half"], {"enforce_eager": True, "dtype": "half"}),
        (["--no-enable-prefix-caching"], {"enable_prefix_caching": False}),
        (["--watermark", "0.5"], {"watermark": 0.5}),
        (["--long-prefill-token-threshold", "-1"], {"long_prefill_token_threshold": -1}),
        (["--hf-overrides", '{"rope_theta": 1e4}'], {"hf_overrides": {"rope_theta": 10000.0}}),
        (["--num-gpu-blocks-override", "[10, 20]"], {"num_gpu_blocks_override": [10, 20]}),
        (["--revision", "123"], {"revision": "123"}),
        (["--tokenizer", "a=b"], {"tokenizer": "a=b"}),
    ],
    ids=lambda value: " ".join(value) or "none" if isinstance(value, list) else "",
)
def test_engine_arguments_are_read_off_words(words, arguments):
    assert engine_arguments(words) == arguments


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ("--tp 4 M", "--tp 4"),
        ("M --tp 4", "--tp 4"),
        ("--tp=4 M", "--tp=4"),
        ("--no-enable-prefix-caching M", "--no-enable-prefix-caching"),
        ("--enable-expert-parallel M --tp 2", "--enable-expert-parallel --tp 2"),
        ("--enable-expert-parallel false M", "--enable-expert-parallel false"),
    ],
)
def test_a_model_may_stand_anywhere_among_options(words, left):
    assert parted(words.split(), {}) == (["M"], left.split())


def test_a_value_is_no_model():
    assert parted(["--tp", "4"], {}) == ([], ["--tp", "4"])


def test_a_commands_own_options_keep_their_values():
    takes = {"--prompt": True, "-p": True, "--json": False}
    words = ["--seed", "1", "--prompt", "--odd", "-p", "M", "--json", "--prompt=x", "N", "--eager", "--", "--tp"]
    own = ["--prompt", "--odd", "-p", "M", "--json", "--prompt=x", "N", "--", "--tp"]
    assert parted(words, takes) == (own, ["--seed", "1", "--eager"])


@pytest.mark.parametrize("words", [["stray"], ["--seed", "1", "2"], ["--seed", "1", "--seed", "2"]])
def test_words_that_spell_nothing_are_refused(words):
    with pytest.raises(ValueError, match=r"unexpected argument|given twice"):
        engine_arguments(words)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("cache_bytes", 3 * 2**30, "3.00 GiB"),
        ("bytes", 100, "100 B"),
        ("num_blocks", 12345, "12,345"),
        ("tok_s", 34927.2, "34,927"),
        ("tok_s", 258.74, "258.7"),
        ("window", None, "-"),
        ("tied", True, "True"),
        ("layers", (0, 1), "0, 1"),
    ],
)
def test_cells_are_readable(name, value, text):
    assert readable(name, value) == text


def test_starting_up_imports_no_backend():
    code = "import sys, octavo.engine.cli; print([m for m in ('jax', 'torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_the_installed_command_runs():
    octavo = Path(sys.executable).parent / "octavo"
    done = subprocess.run([octavo, "--help"], capture_output=True, text=True, check=True, timeout=60)
    for command in ("generate", "chat", "models", "plan"):
        assert command in done.stdout
