# SPDX-License-Identifier: MIT
"""The cache of experts, llama.cpp's whole layers or no other machine, whichever is faster."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import hobbits
import models
import on_rpc
import pytest
from conftest import RunPyhobbit
from servers import serving

from pyhobbit.engine import placement
from pyhobbit.errors import ConfigError
from pyhobbit.settings.config import CacheConfig, EngineConfig

DEVICE = ("--device", "RPC0", "--device-memory", "14M")  # for the experts of one layer of six
LAYERS = "whole layers as by llama.cpp's --n-cpu-moe 5"
SAID = {
    "layers": f"{LAYERS}, measured faster on RPC0 than the cache of experts: ",
    "cache": f"the cache of experts, measured faster on RPC0 than {LAYERS}: ",
}
ON_CPU = r"tensor blk\.(\d)\.ffn_up_exps\.weight .* buffer type overridden to CPU"

_MEASURE = """
import sys
from pyhobbit.cli.main import main
from pyhobbit.engine import placement
placement.TEXT_TOKENS = 4
sys.exit(main(sys.argv[1:]))
"""
_OPEN = """
import json
import sys
from pyhobbit import Hobbit
from pyhobbit.cli import serve
from pyhobbit.cli.help import Parser
from pyhobbit.native.rpc_servers import add_rpc_servers
add_rpc_servers(sys.argv[2])
with Hobbit(sys.argv[1], n_gpu_layers=-1, n_ctx=256, device="RPC0", device_memory="14M") as model:
    text = model.create_completion("def read", max_tokens=12, temperature=0)["choices"][0]["text"]
    print(json.dumps([model.placement.n_cpu, model.stats().info.on_device, text]))
parser = Parser()
serve.add_arguments(parser)
args = serve.parse(parser, [sys.argv[1], "--device", "RPC0", "--device-memory", "14M", "--ctx", "256"])
sys.stderr = sys.stdout
print(json.dumps(serve._arguments_of_model(args)))
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the decision."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return tmp_path / "pyhobbit-placements"


def test_the_faster_one_is_measured_once_kept_said_and_obeyed(
    rpc: str, run_pyhobbit: RunPyhobbit, home: Path, tmp_path: Path
) -> None:
    command = ("chat", models.tiny(), *on_rpc.CHAT, "--rpc", rpc, *DEVICE)
    done = subprocess.run(
        [sys.executable, "-P", "-c", _MEASURE, *map(str, command)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert f"measuring {LAYERS} and the cache of experts on RPC0, once" in done.stderr
    (file,) = home.iterdir()
    found = json.loads(file.read_text())
    assert SAID["layers" if found["layers"] < found["cache"] else "cache"] in done.stderr
    assert f"; kept in {file}\n" in done.stderr
    assert re.search(r" ms a token, not [\d.]+; kept in ", done.stderr)
    for faster in ("layers", "cache"):
        file.write_text(json.dumps({**found, "layers": 0.002, "cache": 0.002, faster: 0.001}))
        again = run_pyhobbit(*command, "--verbose", "--stats-json", tmp_path / "stats.json")
        assert again.stdout == done.stdout != ""
        assert "measuring" not in again.stderr
        said = f"{SAID[faster]}1.0 ms a token, not 2.0"
        assert f"pyhobbit: placement: {said}\n" in again.stderr
        assert json.loads((tmp_path / "stats.json").read_text())["on_device"] == (faster == "cache")
        assert {*re.findall(ON_CPU, again.stderr)} == ({*"01234"} if faster == "layers" else set())
    file.write_text(json.dumps({"layers": 0.001, "cache": 0.002}))
    hobbit, *rows, arguments = hobbits.run_script(_OPEN, models.tiny(), rpc).splitlines()
    assert json.loads(hobbit) == [5, False, done.stdout[:-1]]
    assert f"pyhobbit: placement {SAID['layers']}1.0 ms a token, not 2.0" in rows
    given = json.loads(arguments)
    assert given[given.index("--n-cpu-moe") + 1] == "5"
    assert "placement=str:layers" in arguments


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--placement", "layers"), f"placement: {LAYERS}, as asked"),
        (("--placement", "cache"), "experts on the GPU: "),
        (("--set", "mode=gpu"), "experts on the GPU: "),
        (("--memory", "100M"), "experts on the GPU: "),  # does not hold what llama.cpp maps
    ],
)
def test_nothing_is_measured_where_one_is_asked_for(
    rpc: str, run_pyhobbit: RunPyhobbit, home: Path, options: tuple[str, ...], said: str
) -> None:
    done = run_pyhobbit("chat", models.tiny(), *on_rpc.CHAT, "--rpc", rpc, *DEVICE, *options)
    assert done.returncode == 0, done.stderr
    assert said in done.stderr
    assert "measuring" not in done.stderr
    assert not home.exists()


def test_layers_of_a_cache_are_refused(tiny_gguf: Path, rpc: str, run_pyhobbit: RunPyhobbit) -> None:
    refused = "--placement layers leaves the experts to llama.cpp and has no mode; leave one out"
    low = f"'{tiny_gguf}' has a low tier, which needs the cache: leave --placement out"
    much = "of host memory, and --memory allows 100.0 MiB; leave one out"
    cases = (
        (models.tiny(), ("--set", "mode=gpu"), refused),
        (models.tiny(), ("--memory", "100M"), much),
        (tiny_gguf, (), low),
    )
    for model, options, said in cases:
        command = ("chat", model, *on_rpc.CHAT, "--rpc", rpc, *DEVICE, "--placement", "layers", *options)
        done = run_pyhobbit(*command)
        assert (done.returncode > 0, done.stdout) == (True, "")
        assert said in done.stderr


def test_a_machine_that_makes_it_slower_is_left_out(
    rpc: str, run_pyhobbit: RunPyhobbit, home: Path, tiny_gguf: Path, tmp_path: Path
) -> None:
    options = ("--rpc", rpc)
    here = run_pyhobbit("chat", tiny_gguf, *on_rpc.CHAT)
    inspected = run_pyhobbit("inspect", tiny_gguf, *options, "--ctx", 256)
    assert re.search("^placement .*measured faster", inspected.stdout, re.MULTILINE), inspected.stderr
    (file,) = home.iterdir()
    found = json.loads(file.read_text())
    assert found["cache"] > 0 < found["alone"]
    again = run_pyhobbit("inspect", tiny_gguf, *options, "--ctx", 256)
    assert "measuring the cache of experts and this machine alone" not in again.stderr
    stats = tmp_path / "stats.json"
    said = {
        "alone": "this machine alone, measured faster than the cache of experts: 1.0 ms",
        "cache": "the cache of experts, measured faster on RPC0 than this machine alone: 1.0 ms",
    }
    for faster, on_device in (("alone", False), ("cache", True)):
        file.write_text(json.dumps({"cache": 0.002, "alone": 0.002, faster: 0.001}))
        done = run_pyhobbit("chat", tiny_gguf, *on_rpc.CHAT, *options, "--stats-json", stats)
        assert (done.returncode, done.stdout) == (0, here.stdout)
        assert json.loads(stats.read_text())["on_device"] == on_device
        assert said[faster] in done.stderr
        with serving(tiny_gguf, tmp_path / "log", *options, "--ctx-size", 256) as server:
            first = server.log.read_text()
            assert f"pyhobbit: placement {said[faster]}" in first
            assert ("(18.0 MiB), on RPC0" in first) == on_device


@pytest.mark.parametrize(("n", "said"), [(0, "none"), (2, "2")])
def test_layers_without_a_gpu_or_with_several_are_refused(
    monkeypatch: pytest.MonkeyPatch, n: int, said: str
) -> None:
    monkeypatch.setattr(placement, "gpus", lambda: [SimpleNamespace(name="Vulkan0", is_integrated=False)] * n)
    with pytest.raises(ConfigError, match=f"needs one GPU, and {said} can be used"):
        placement.choose(models.tiny(), EngineConfig(cache=CacheConfig(placement="layers")))
