"""What the files of a model cannot do to whoever runs it: no code, no network, no hold of the terminal."""

from __future__ import annotations

import ast
import io
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from test_generate import refused
from test_imports import ENGINE, KERNELS

from tritonmoe.chat import emit
from tritonmoe.engine import Engine
from tritonmoe.errors import MAX_MESSAGE, CheckpointError, InputError, TritonMoeError, printable

# Whatever turns data into code, starts programs, or fetches them.
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "breakpoint"}
FORBIDDEN_MODULES = {
    "pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "runpy", "code", "codeop",
    "imp", "subprocess", "pty", "multiprocessing", "socket", "urllib", "http", "ftplib", "smtplib", "requests", "httpx",
    "aiohttp", "transformers",
}  # fmt: skip
FORBIDDEN_NAMES = {
    "torch.load", "torch.save", "torch.hub", "torch.package", "torch.jit.load", "np.load", "np.save", "numpy.load",
    "os.system", "os.popen", "os.execv", "os.execve", "os.spawnv", "os.fork", "os.posix_spawn", "yaml.load",
}  # fmt: skip


# What may be imported all the same: the doctor asks the driver's own program about the link, in fixed words.
EXCEPTIONS = {"doctor": {"subprocess"}}


@pytest.mark.parametrize("path", [*ENGINE, *KERNELS], ids=lambda path: path.stem)
def test_no_way_from_data_to_code(path: Path) -> None:
    forbidden = FORBIDDEN_MODULES - EXCEPTIONS.get(path.stem, set())
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            assert not {name.split(".")[0] for name in names} & forbidden, ast.unparse(node)
        elif isinstance(node, ast.Name):
            assert node.id not in FORBIDDEN_CALLS, f"line {node.lineno}"
        elif isinstance(node, ast.Attribute):
            assert ast.unparse(node) not in FORBIDDEN_NAMES, f"line {node.lineno}"
        elif isinstance(node, ast.keyword):
            assert node.arg not in ("trust_remote_code", "shell", "weights_only")
            assert node.arg != "allow_pickle" or ast.unparse(node.value) == "False", f"line {node.value.lineno}"


def test_the_forbidden_is_found(tmp_path: Path) -> None:
    for line in (
        "import pickle",
        "torch.load(x)",
        "eval(x)",
        "np.load(x)",
        "f(allow_pickle=True)",
        "from http import client",
    ):
        (tmp_path / "x.py").write_text(line)
        with pytest.raises(AssertionError):
            test_no_way_from_data_to_code(tmp_path / "x.py")


def test_no_network_to_import_and_to_run_a_local_model() -> None:
    """Whatever asks for a connection or a name's address is seen by the interpreter itself."""
    script = """
import sys
def watch(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "urllib.Request"):
        print("network:", event, arguments, file=sys.stderr)
        import os; os._exit(9)
sys.addaudithook(watch)
import pkgutil, importlib, tritonmoe
for module in pkgutil.walk_packages(tritonmoe.__path__, "tritonmoe."):
    importlib.import_module(module.name)
from tritonmoe.generate import main
sys.exit(main(["Once upon a time", "--max-new-tokens", "3", "--chat"]))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_tests_have_no_network(network_attempts: list[str]) -> None:
    for reach in (
        lambda: socket.create_connection(("192.0.2.1", 80), timeout=1),
        lambda: socket.getaddrinfo("example.org", 80),
    ):
        with pytest.raises(OSError, match="tests have no network"):
            reach()
    assert len(network_attempts) == 2
    network_attempts.clear()
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).close()


# The terminal


def test_errors_do_not_steer_the_terminal() -> None:
    text = "a\x1b[2J\x1b]52;c;cm0=\x07 b\nc\r\x9b1m \u202egnp.exe \ud800 é漢 \U0001f600"
    error = InputError(text)
    assert str(error).isprintable()
    assert str(error).startswith(r"a\x1b[2J\x1b]52;c;cm0=\x07 b\nc\r\x9b1m \u202egnp.exe \ud800 é漢 ")
    assert str(error).encode()
    assert issubclass(CheckpointError, TritonMoeError)


@pytest.mark.parametrize("text", ["x" * MAX_MESSAGE, "x" * 10_000_000 + "; do that", "\x1b" * 5000, ""])
def test_errors_are_short(text: str) -> None:
    shown = printable(text)
    assert len(shown) <= MAX_MESSAGE
    assert text[-5:] in shown or "\x1b" in text  # what to change stands at the end
    assert (shown == text) == (len(text) <= MAX_MESSAGE and text.isprintable())


def test_names_in_the_command_line(capsys: pytest.CaptureFixture[str], model_folder: Path) -> None:
    assert r"\x1b[2J" in refused(capsys, "x", "--model", "./\x1b[2J")
    assert r"\x1b[2J" in refused(capsys, "x", "--device", "\x1b[2J")
    config = (model_folder / "config.json").read_text()
    (model_folder / "config.json").write_text(config.replace("{", '{"\\u001b[2J": 1, ', 1))
    command = [sys.executable, "-m", "tritonmoe.generate", "x", "--max-new-tokens", "1", "--model", str(model_folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=120, check=True)
    assert rb"not understood and ignored: \x1b[2J" in done.stderr
    assert b"\x1b" not in done.stderr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_generated_text_is_shown_on_a_terminal_and_left_alone_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "one\ttwo\nthree \x1b]0;x\x07\r\x9b2J é"
    for stream, expected in ((Terminal(), "one\ttwo\nthree \\x1b]0;x\\x07\\x0d\\x9b2J é"), (io.StringIO(), text)):
        monkeypatch.setattr(sys, "stdout", stream)
        emit(text)
        assert stream.getvalue() == expected


# What a model folder may lead to


def test_a_link_out_of_the_folder_tells_nothing(model_folder: Path, tmp_path: Path) -> None:
    """Links are followed, as in the cache of the Hub; what is no model file is refused without quoting it."""
    (tmp_path / "secret").write_text("pass" + "word of somebody")
    for name in (
        "config.json",
        "tokenizer.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer_config.json",
    ):
        original = (model_folder / name).read_bytes() if (model_folder / name).exists() else None
        (model_folder / name).unlink(missing_ok=True)
        (model_folder / name).symlink_to(tmp_path / "secret")
        with pytest.raises(TritonMoeError) as caught:
            Engine.from_pretrained(model_folder)
        assert "pass" + "word" not in str(caught.value)
        (model_folder / name).unlink()
        if original is not None:
            (model_folder / name).write_bytes(original)
    assert Engine.from_pretrained(model_folder).generate("x").token_ids


def test_files_beside_the_weights_are_not_executed(model_folder: Path, tmp_path: Path) -> None:
    """Pickles and Python files of a repository stay unread, whatever config.json says of them."""
    marker = tmp_path / "executed"
    payload = f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()
    for name in ("pytorch_model.bin", "model.pt", "training_args.bin", "optimizer.pt"):
        (model_folder / name).write_bytes(payload)
    code = f"open({str(marker)!r}, 'w')"
    for name in ("modeling_x.py", "configuration_x.py", "tokenization_x.py", "conftest.py", "sitecustomize.py"):
        (model_folder / name).write_text(code)
    config = (model_folder / "config.json").read_text()
    references = '{"auto_map": {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X"}, '
    (model_folder / "config.json").write_text(config.replace("{", references, 1))
    assert Engine.from_pretrained(model_folder).generate("x").token_ids
    assert not marker.exists()
