# SPDX-License-Identifier: MIT
"""Resources that a Hobbit takes from a process, and gives back."""

import re
from collections.abc import Callable
from pathlib import Path

import fake_hub
import models
import pytest
import random_moe
from hobbits import PROMPT, open_model, run_script, text_of

from bench.harness.system import NoCgroupError, memory_cgroup
from pyhobbit import Hobbit, HobbitError

_BUDGETS = """
import re, sys
from pyhobbit import Hobbit, HobbitError

def smallest(**arguments):
    try:
        Hobbit(sys.argv[1], memory=1000, verbose=False, **arguments)
    except HobbitError as e:
        return int(re.search(r"smallest that works is (\\d+) MiB", str(e))[1]) << 20
"""


def test_two_models_keep_within_the_memory_that_each_was_given(tiny_gguf: Path) -> None:
    body = """
first = Hobbit(sys.argv[1], memory=smallest() + (4 << 20), verbose=False)
pools = first.info().pool_bytes_high
second = Hobbit(sys.argv[1], memory=smallest() + (12 << 20), verbose=False)
for model in (first, second, first):
    model("def read_file(path):", max_tokens=16)
print(pools, first.info().pool_bytes_high, second.info().pool_bytes_high)
print(second.info().memory, second.stats().peak_rss_bytes)
"""
    before, first, second, memory, peak = map(int, run_script(_BUDGETS + body, tiny_gguf).split())
    assert before == first < second
    assert peak <= memory


def test_logits_that_nobody_reads_take_no_memory_from_the_experts(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    shape = random_moe.Shape(n_layer=1, n_vocab=16_000)
    random_moe.write_model(random_moe.declare("qwen3moe", shape), path, models.lib_dir())
    body = "print(smallest(n_ctx=512), smallest(n_ctx=512, logits_all=True))"
    one, everything = map(int, run_script(_BUDGETS + body, path).split())
    assert everything - one > 512 * 4 * shape.n_vocab / 2


_REFUSED = """
import resource, sys
from pathlib import Path
from pyhobbit import CacheConfig, Engine, EngineConfig, Hobbit, HobbitError
from pyhobbit.engine.plan import lay_out
from pyhobbit.engine.stats import peak_rss_bytes

def refusal(**arguments):
    try:
        Hobbit(sys.argv[1], verbose=False, **arguments)
    except HobbitError as e:
        return str(e)
    return "not refused"

before = peak_rss_bytes()
"""


def test_a_context_that_does_not_fit_is_refused_before_it_is_made(tiny_gguf: Path) -> None:
    body = """
print(refusal(n_ctx=1 << 20, memory="300M"))
print(refusal(n_ctx=1 << 20, memory="300M", logits_all=True))
print(peak_rss_bytes() - before)
print(refusal(n_ctx=1 << 24, pools="8M"))
print(refusal(n_ctx=1 << 30, pools="8M"))
"""
    *bounds, taken, large, absurd = run_script(_REFUSED + body, tiny_gguf).splitlines()
    assert re.search(r"does not fit into memory: .* GiB for a context of 16777216 tokens.* are free; ", large)
    assert "a context of 1073741824 tokens does not fit into memory" in absurd
    for line in bounds:
        assert re.search(
            r"budget of 300.0 MiB is too small: the smallest that works is \d+ MiB \(.* 1048576", line
        )
    assert int(taken) < 160 << 20  # such a context would take 3 GiB


def test_a_context_that_does_not_fit_into_a_cgroup_is_refused(tiny_gguf: Path) -> None:
    body = """
Path(sys.argv[2]).write_text(str(os.getpid()))
print(refusal(n_ctx=400_000, pools="8M"))
try:
    Engine(sys.argv[1], EngineConfig(CacheConfig(pools=8 << 20), n_ctx=512, n_threads=1)).open()
except HobbitError as e:
    print(e)
else:
    print("opened")
"""
    try:
        with memory_cgroup(600 << 20) as cgroup:
            printed = run_script("import os" + _REFUSED + body, tiny_gguf, cgroup.procs)
    except NoCgroupError as e:
        pytest.skip(str(e))
    refused, opened = printed.splitlines()
    assert re.search(r"does not fit into memory: .* for a context of 400000 tokens", refused)
    assert opened == "opened"


@pytest.mark.parametrize(
    "opening",
    ["Hobbit(sys.argv[1], memory=N, n_ctx=512, verbose=False)", "Engine(sys.argv[1], _engine(N)).open()"],
)
def test_the_smallest_budget_that_is_named_works(opening: str, tiny_gguf: Path) -> None:
    body = """
_engine = lambda n: EngineConfig(CacheConfig(memory=n), n_ctx=512, n_threads=1)
N = int(sys.argv[2])
try:
    OPENING
except HobbitError as e:
    print(e)
else:
    print("opened")
"""
    body = _REFUSED + body.replace("OPENING", opening)
    named = re.search(r"the smallest that works is (\d+) MiB", run_script(body, tiny_gguf, 1000))
    assert named is not None
    assert run_script(body, tiny_gguf, int(named[1]) << 20) == "opened\n"


#
# the end
#

AFTER_CLOSE: dict[str, Callable[[Hobbit], object]] = {
    "completion": lambda model: model("x"),
    "chat": lambda model: model.create_chat_completion([{"role": "user", "content": "x"}]),
    "tokenize": lambda model: model.tokenize(b"x"),
    "detokenize": lambda model: model.detokenize([5]),
    "eval": lambda model: model.eval([5]),
    "embed": lambda model: model.embed("x"),
    "save_state": lambda model: model.save_state(),
    "n_ctx": lambda model: model.n_ctx(),
    "n_vocab": lambda model: model.n_vocab(),
    "token_eos": lambda model: model.token_eos(),
    "tokenizer": lambda model: model.tokenizer(),
    "ctx": lambda model: model.ctx,
    "model": lambda model: model.model,
    "stats": lambda model: model.stats(),
    "set": lambda model: model.set(t1=0.5, t2=0.9),
    "enter": lambda model: model.__enter__(),
}


@pytest.fixture(scope="module")
def closed_model(tiny_gguf: Path) -> Hobbit:
    model = open_model(tiny_gguf)
    model.close()
    model.close()
    return model


@pytest.mark.parametrize("name", AFTER_CLOSE)
def test_a_closed_model_says_so(name: str, closed_model: Hobbit) -> None:
    with pytest.raises(HobbitError, match="the model is closed"):
        AFTER_CLOSE[name](closed_model)


def test_a_generator_of_a_closed_model_says_so(tiny_gguf: Path) -> None:
    model = open_model(tiny_gguf)
    tokens = model.generate(model.tokenize(PROMPT.encode()), temp=0.0)
    next(tokens)
    model.close()
    with pytest.raises(HobbitError, match="the model is closed"):
        next(tokens)


def test_an_incomplete_trace_is_told_at_the_end(tiny_gguf: Path) -> None:
    model = open_model(tiny_gguf, trace="/dev/full")
    text_of(model)
    with pytest.raises(HobbitError, match="/dev/full"):
        model.close()
    model.close()


def test_a_model_that_nobody_closes_is_freed_when_nobody_has_it(tiny_gguf: Path) -> None:
    body = """
import gc, sys, time
from pyhobbit import Hobbit

threads = lambda: int(open("/proc/self/status").read().split("Threads:")[1].split()[0])
model = Hobbit(sys.argv[1], pools="8M", verbose=False, kv_overrides={"hobbit.io_threads": 3})
model("import os", max_tokens=4)
before = threads()
stream = model("import sys", max_tokens=4, stream=True)
next(stream)
del model, stream
gc.collect()
end = time.monotonic() + 60
while before - threads() < 3 and time.monotonic() < end:  # one that was joined counts for a moment
    time.sleep(0.01)
print(before - threads())
left_open = Hobbit(sys.argv[1], pools="8M", verbose=False)
left_open("import os", max_tokens=4)
"""
    assert int(run_script(body, tiny_gguf)) >= 3  # the loader's threads were joined


def test_opening_and_closing_leaves_nothing_behind(tiny_gguf: Path) -> None:
    body = """
import ctypes, gc, sys
from pyhobbit import Hobbit, HobbitError

class Mallinfo(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Mallinfo

def allocated():
    gc.collect()
    info = mallinfo()
    return info.uordblks + info.hblkhd

def cycle():
    with Hobbit(sys.argv[1], pools="16M", verbose=False) as model:
        model("def read_file(path):", max_tokens=8, temperature=0.0)
        in_use = allocated()
    try:
        Hobbit(sys.argv[1], pools=1000, verbose=False)
    except HobbitError:
        return in_use

for _ in range(12):  # Python's own tables grow at first
    cycle()
before = allocated()
for _ in range(20):
    in_use = cycle()
print(in_use - before, allocated() - before)
"""
    one_model, left = map(int, run_script(body, tiny_gguf).split())
    assert one_model > 16 << 20
    assert left < 64 << 10, f"20 models left {left} bytes"


def test_importing_the_package_brings_no_native_library() -> None:
    body = """
import sys
import pyhobbit
print(sorted({"llama_cpp", "numpy", "cffi", "jinja2", "huggingface_hub"} & sys.modules.keys()))
assert "Hobbit" in pyhobbit.__all__
assert "huggingface_hub" not in sys.modules
"""
    assert run_script(body).strip() == "[]"


def test_from_pretrained_downloads_and_opens(tiny_gguf: Path, tmp_path: Path) -> None:
    files = {"tiny-f16.gguf": tiny_gguf.read_bytes(), "README.md": b"text"}
    body = """
import io, sys
from pyhobbit import Hobbit, HobbitError
sys.stderr = io.StringIO()  # hides progress
with Hobbit.from_pretrained("user/tiny", pools="8M", verbose=False) as model:
    print(model.info().cached, model.model_path)
try:
    Hobbit.from_pretrained("user/tiny:q4")
except HobbitError as e:
    print(e)
from llama_cpp import Llama
Llama.from_pretrained = classmethod(lambda cls, *given, **more: (cls.__name__, *given, more))
print(Hobbit.from_pretrained("user/tiny", "*f16.gguf", local_dir="here", pools="8M"))
"""
    with fake_hub.serving(fake_hub.Hub({"user/tiny": files})) as hub:
        environment = {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }
        lines = run_script(body, **environment).splitlines()
    assert lines[0].split()[0] == "True"
    assert "user/tiny has no q4" in lines[1]
    assert lines[2] == "('Hobbit', 'user/tiny', '*f16.gguf', {'local_dir': 'here', 'pools': '8M'})"
