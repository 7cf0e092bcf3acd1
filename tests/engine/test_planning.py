# SPDX-License-Identifier: MIT
"""A plan of memory takes none: no pool is allocated, no page committed, no weight read."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import random_moe
import random_weights

from pyhobbit.engine.session import one_sequence, simulated
from pyhobbit.model.gguf_file import read_gguf
from pyhobbit.native.ffi import llama, plan_of
from pyhobbit.quality.stored import Calibration
from pyhobbit.settings.config import EngineConfig

pytestmark = pytest.mark.model

_MIB = 1 << 20
_SHAPE = random_moe.Shape(n_layer=16, n_embd=2048, n_ff=768, n_expert=128, n_used=8, n_vocab=151936)
_N_EXPERTS = _SHAPE.n_layer * _SHAPE.n_expert

_RUN = """
import contextlib, io, sys
from argparse import Namespace
from pathlib import Path
verb, model = sys.argv[1:]
from pyhobbit import Hobbit
from pyhobbit.cli.main import main
from pyhobbit.cli import serve
from pyhobbit.engine import plan
from pyhobbit.engine.stats import peak_rss_bytes
from pyhobbit.hobbit import hobbit
from pyhobbit.settings.config import CacheConfig

class Planned(BaseException):
    pass

def planned(*given, **named):
    plan.lay_out(*given, **named)
    raise Planned

def opened(*given, **named):
    raise Planned

hobbit.lay_out, plan.Session = planned, opened
prompts = {"chat": ["-p", "x"], "inspect": ["--no-speed"]}
with contextlib.redirect_stdout(io.StringIO()):
    try:
        if verb == "serve":
            args = Namespace(batch=None, passed_on=[])
            assert serve._check_memory(Path(model), CacheConfig(memory=3 << 30), args).info.cached
        elif verb == "Hobbit":
            Hobbit(model, memory="3G", verbose=False)
        else:
            assert main([verb, model, "--memory", "3G", *prompts.get(verb, ())]) == 0
        assert verb in ("serve", "config", "inspect")
    except Planned:
        assert verb in ("chat", "bench", "Hobbit")
counted = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
print(peak_rss_bytes(), counted["rchar"])
"""


@pytest.fixture(scope="module")
def hole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model of 6 GB, without its weights, and a calibration that knows which experts are used."""
    path = tmp_path_factory.mktemp("hole") / "qwen3moe.gguf"
    random_weights.write_header(random_moe.declare("qwen3moe", _SHAPE, "q4_0", "q8_0"), path)
    size = path.stat().st_size
    assert size > 5 << 30
    assert path.stat().st_blocks * 512 < 16 * _MIB
    Calibration(size, expert_uses=tuple(range(_N_EXPERTS))).write(path)
    yield path
    path.unlink()


@pytest.mark.parametrize("verb", ["config", "inspect", "serve", "chat", "bench", "Hobbit"])
def test_a_plan_takes_no_memory_and_reads_headers_alone(verb: str, hole: Path, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    traced = ["strace", "-f", "-y", "-qq", "-e", "trace=mmap,madvise,read,lseek,pread64,close", "-o", calls]
    command = [*traced, sys.executable, "-P", "-c", _RUN, verb, hole]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    peak, read = map(int, done.stdout.split())
    assert peak < 200 * _MIB
    assert read < 128 * _MIB  # the header of 5 MiB several times, and Python's own modules
    seen = calls.read_text()
    # addresses that nobody may write to are no memory: allocators keep some
    mapped = re.findall(r"mmap\(\w+, (\d+), PROT_(?!NONE)[^(]*MAP_ANONYMOUS", seen)
    assert 0 < max(map(int, mapped)) <= 64 * _MIB
    assert "MADV_POPULATE" not in seen
    assert _read_behind(read_gguf(hole).tensors[0].offset, hole, seen) < 64 << 10


def _read_behind(header: int, path: Path, seen: str) -> int:
    """Bytes that reads behind the header took: the C library reads a page where it looks for a file's end."""
    places: dict[str, int] = {}  # by descriptor
    total = 0
    calls = re.findall(rf"(\w+)\((\d+)<{re.escape(str(path))}>.*= (\d+)", seen)
    assert {call for call, *_ in calls} == {"read", "lseek", "close"}
    for call, descriptor, result in calls:
        start = places.get(descriptor, 0) if call == "read" else 0
        places[descriptor] = start + int(result)
        total += int(result) if call == "read" and start >= header else 0
    return total


@pytest.mark.parametrize(
    ("stored", "given", "is_there"),
    [
        (None, {}, True),
        (0, {}, False),
        (0, {"hobbit.prefetch": 2}, True),
        (None, {"hobbit.prefetch": 0}, False),
    ],
)
def test_the_predictors_memory_follows_the_settings_wherever_they_are(
    stored: int | None, given: dict[str, int], is_there: bool, hole: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model.gguf"
    model.symlink_to(hole)
    if stored is not None:
        Calibration(hole.stat().st_size, found={"prefetch": stored}).write(model)
    settings = {"hobbit.pools": 1 << 30, **given}
    with simulated(model, settings) as opened:
        params = llama.llama_context_default_params()
        one_sequence(EngineConfig(n_ctx=256))(params, opened)
        needs, _ = plan_of(opened.pointer, params, (), (), 1 << 40)
    of_layer = (2 * _SHAPE.n_expert + 4) * _SHAPE.n_embd  # the router in half precision, and the norm's gains
    assert needs.pools.prefetch_bytes == (_SHAPE.n_layer * of_layer if is_there else 0)
    assert needs.pools.batch_bytes > needs.pools.prefetch_bytes
