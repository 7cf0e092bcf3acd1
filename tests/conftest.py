# SPDX-License-Identifier: MIT
"""Fixtures that several test modules share."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import forked
import logits
import modelled
import models
import pytest
import rpc_server
from built import MECHANISMS
from exactness import SHORT_PLANS

from pyhobbit.convert import checkpoint
from pyhobbit.settings.papers import PAPERS

# A run in the background may have been told to ignore these; so would the programs that the tests interrupt.
for _signal, _default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_signal) is signal.SIG_IGN:
        signal.signal(_signal, _default)

# Idle OpenMP threads of programs sleep: beside others, spinning costs several times the work itself.
os.environ["OMP_WAIT_POLICY"] = "passive"
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # they spin at each import of numpy, too


TESTS = Path(__file__).resolve().parent
TINY_MODEL = TESTS / "tiny_moe" / "model"
PERMITTED_SKIPS = TESTS / "permitted_skips.txt"

# `make quick` leaves out these folders, tests with these fixtures, and what is marked model or slow.
WHOLE_PROGRAM = {"bench", "deploy", "device", "faults", "hobbit", "issues", "modelled_device", "server"}
RUN_A_MODEL = {"on_cpu", "rpc", "run_pyhobbit", "tiny_gguf"}

# Leaves out the tests of mechanisms that are not built, and of papers that need them. A conftest.py in their
# folder would hide this one.
collect_ignore = [str(path) for path in (TESTS / "mechanisms").iterdir() if path.name not in MECHANISMS]
collect_ignore += [
    str(path)
    for path in (TESTS / "papers").glob("test_*.py")
    if path.stem.removeprefix("test_paper_") not in PAPERS
]
if not {"daop", "edgemoe", "hobbit", "mobile", "twiddler"} <= PAPERS.keys():
    # they compare these papers
    beside = (
        "bench",
        "carved_moe/test_ideas.py",
        "device/test_gpu.py",
        "docs/test_figures.py",
        "quality/test_cloze.py",
    )
    collect_ignore += [str(TESTS / each) for each in beside]


RunPyhobbit = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def run_pyhobbit(tmp_path_factory: pytest.TempPathFactory) -> RunPyhobbit:
    """Runs the installed `pyhobbit ARGS...`, not in the checkout, whose folder pyhobbit/ has no libraries."""
    folder = tmp_path_factory.mktemp("cwd")

    def run(*args: object, stdin: str = "", timeout: float = 900) -> "subprocess.CompletedProcess[str]":
        return forked.PYHOBBIT.run(args, stdin, timeout, folder)

    return run


@pytest.fixture(scope="session", autouse=True)
def _converter_is_forked() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        known = {"Popen": forked.start_converter, "TimeoutExpired": subprocess.TimeoutExpired}
        monkeypatch.setattr(checkpoint, "subprocess", SimpleNamespace(**known))
        yield


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained tiny model with two tiers, high f16 and low q4_0."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    return Path(shutil.copyfile(models.tiny_tiers("f16", "q4_0"), path))


@pytest.fixture(scope="session")
def rpc() -> Iterator[str]:
    """The address of an RPC server with one device, RPC0."""
    with rpc_server.running(models.lib_dir()) as (endpoint, _):
        yield endpoint


@pytest.fixture(scope="session")
def on_cpu(tiny_gguf: Path) -> logits.Result:
    """Results of the tiny model without a device."""
    return logits.run(models.lib_dir(), tiny_gguf, SHORT_PLANS, {"hobbit.pools": 64 << 20})


@pytest.fixture(scope="session")
def quantized_on_cpu() -> logits.Result:
    """Results of modelled.quantized() without a device."""
    return logits.run(models.lib_dir(), modelled.quantized(), SHORT_PLANS, {"hobbit.pools": 64 << 20})


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Iterator[None]:
    """The folders of a module's fixtures go with them; pytest keeps them until the whole run ends."""
    if fixturedef.scope != "module":
        return (yield)
    base = request.getfixturevalue("tmp_path_factory").getbasetemp()
    before, made, n_failed = set(base.iterdir()), list[Path](), request.session.testsfailed

    def remove() -> None:
        for path in made if request.session.testsfailed == n_failed else ():
            shutil.rmtree(path, ignore_errors=True)

    request.addfinalizer(remove)  # behind the fixture's own
    try:
        return (yield)
    finally:
        made.extend(set(base.iterdir()) - before)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        os.environ[models.FOLDER] = tempfile.mkdtemp(prefix="pyhobbit-models-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(models.FOLDER), ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if item.path.parent.name in WHOLE_PROGRAM or fixtures & RUN_A_MODEL:
            item.add_marker("model")
    if "kernels" not in config.option.markexpr:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("kernels")])
        items[:] = [item for item in items if not item.get_closest_marker("kernels")]


def _unexpected_skips(config: pytest.Config) -> list[str]:
    """The skips of this run that permitted_skips.txt does not have, as `file: reason`."""
    lines = PERMITTED_SKIPS.read_text("utf-8").splitlines()
    permitted = tuple(line for line in lines if line and not line.startswith("#"))
    skips = []
    for report in config.pluginmanager.getplugin("terminalreporter").stats.get("skipped", []):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        file = Path(report.nodeid.split("::")[0])
        skips.append(f"{file.relative_to('tests') if file.parts[0] == 'tests' else file}: {reason}")
    return [skip for skip in skips if not skip.startswith(permitted)]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput") and _unexpected_skips(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for skip in _unexpected_skips(terminalreporter.config):
        terminalreporter.write_line(f"ERROR: {PERMITTED_SKIPS.name} has no line for this skip: {skip}")
