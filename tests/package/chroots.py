# SPDX-License-Identifier: MIT
"""Tries a wheel in fresh installations of Debian, and in odd places: python chroots.py WHEEL [SUITE ...]

Prints a table of commands and results. Needs root, debootstrap and a network; bindfs, dosfstools and fusefat
for the odd places. Each installation is made once, in build/chroots/, and is the lower layer of an overlay.
The mounts end with the process. A wheel for another processor runs by qemu-user-static. `make wheel-test` is
this; `make wheel-bits ARCH=aarch64` adds --bits KIND ..., which only compares the kernels of these kinds
with those of a stock llama.cpp, by the tests that --select names as pytest's -k does.
"""

import argparse
import atexit
import functools
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import fake_hub  # noqa: E402
import models  # noqa: E402

BASES = ROOT / "build" / "chroots"
SUITES = {"bullseye": "Debian 11", "bookworm": "Debian 12", "trixie": "Debian 13"}
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
FIRST_TOKEN_S = 60  # from the beginning of pip install, on two cores
N_PARTS = 60
DEVICES = {"null": 3, "zero": 5, "full": 7, "random": 8, "urandom": 9}
PROMPT = "def read_file(path):"
CLIENT = """
import subprocess, sys, time, urllib.request
from contextlib import suppress
from openai import OpenAI
server = subprocess.Popen([sys.argv[1], "serve", "/srv/tiny.gguf", "--pools", "6M", "--port", "18438"])
for _ in range(120):
    with suppress(OSError), urllib.request.urlopen("http://127.0.0.1:18438/health", timeout=5):
        break
    time.sleep(0.5)
client = OpenAI(base_url="http://127.0.0.1:18438/v1", api_key="none")
answer = client.completions.create(model="tiny", prompt=sys.argv[2], max_tokens=16, temperature=0)
server.terminate()
server.wait(60)
print(answer.choices[0].text)
"""


# How the kernel knows a program of another processor: how an ELF file begins, and which bits of it count.
EMULATED = {
    "aarch64": (
        b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00\xb7\x00",
        b"\xff" * 7 + b"\x00" + b"\xff" * 8 + b"\xfe\xff\xff\xff",
    ),
}


def machine_of(wheel: Path) -> str:
    """The processor that it is for, as `uname -m` names it."""
    return wheel.stem.split("manylinux_2_31_")[1]


class Box:
    """A fresh Debian at `root`; `ada` and `bob` are its users."""

    def __init__(self, root: Path, wheel: Path) -> None:
        self.root = root
        self.wheel = wheel
        self.texts: set[str] = set()

    def run(self, script: str, user: str = "ada", home: str = "", locale: str = "C.UTF-8") -> str:
        """Runs a shell script, and returns its output. Raises RuntimeError with that if it fails."""
        path = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        words = {"HOME": home or f"/home/{user}", "LANG": locale, "PATH": path, "TERM": "dumb"}
        words |= {
            name: value for name, value in os.environ.items() if name in ("PIP_CERT", "PIP_DEFAULT_TIMEOUT")
        }
        command = ["chroot", *([] if user == "root" else [f"--userspec={user}"]), self.root]
        shell = ["/bin/bash", "-ec", f'cd "$HOME"\n{script}']
        done = subprocess.run([*command, *shell], env=words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
        return done.stdout

    def chat(
        self,
        program: str = "~/env/bin/pyhobbit",
        model: str = "/srv/tiny.gguf",
        before: str = "",
        **where: str,
    ) -> str:
        """Continues PROMPT; the text is the same everywhere."""
        text = self.run(f"{before}\n{program} chat {model} -p '{PROMPT}' -n 16 --temp 0 --pools 6M", **where)
        self.texts.add(text.strip())
        if len(self.texts) != 1:
            raise RuntimeError(f"other texts than before: {self.texts}")
        return "the same text"

    def mount(self, *arguments: object) -> None:
        subprocess.run(["mount", *map(str, arguments)], check=True)

    def chat_at_home(self, *mount: object) -> str:
        """Continues PROMPT where home and model are on a file system that the command mounts."""
        home = self.root / "home/mounted"
        home.mkdir(exist_ok=True)
        quiet = subprocess.DEVNULL  # a pipe would stay open as long as a FUSE server runs
        subprocess.run([*map(str, mount), home], check=True, stdout=quiet, stderr=quiet)
        before = 'cp /srv/tiny.gguf ~; [ "$(stat -f -c %T ~)" != overlayfs ]'
        try:
            return self.chat("/home/ada/env/bin/pyhobbit", "~/tiny.gguf", before, home="/home/mounted")
        finally:
            subprocess.run(["umount", home], check=True)


def bare(box: Box) -> str:
    box.run("! command -v gcc cc c++ clang git cmake; test $(id -u) != 0")
    return "no compiler, git or root"


def install(box: Box) -> str:
    start = time.monotonic()
    box.run("python3 -m venv ~/env && ~/env/bin/pip install --quiet /srv/*.whl")
    installed = time.monotonic() - start
    box.run(f"~/env/bin/pyhobbit chat /srv/tiny.gguf -p '{PROMPT}' -n 1 --temp 0")
    took = time.monotonic() - start
    late = "" if took <= FIRST_TOKEN_S else f", above {FIRST_TOKEN_S} s"
    return f"{took:.0f} s to the first token, {installed:.0f} s of them pip's{late}"


def chat(box: Box) -> str:
    return box.chat()


def serve(box: Box) -> str:
    box.run("python3 -m venv ~/client && ~/client/bin/pip install --quiet openai")
    (box.root / "srv/client.py").write_text(CLIENT)
    text = box.run(
        f"~/client/bin/python /srv/client.py ~/env/bin/pyhobbit '{PROMPT}' 2>/tmp/log"
        " || (cat /tmp/log; false)"
    )
    if text.strip() not in box.texts:
        raise RuntimeError(f"another text: {text}")
    return "the same text"


def read_only_home(box: Box) -> str:
    home = box.root / "home/ada"
    box.mount("--bind", home, home)
    box.mount("-o", "remount,bind,ro", home)
    try:
        box.run("! touch ~/file 2>/dev/null")
        return box.chat()
    finally:
        subprocess.run(["umount", home], check=True)


def memory_home(box: Box) -> str:
    return box.chat_at_home("mount", "-t", "tmpfs", "-o", "mode=777", "tmpfs")


def fuse_home(box: Box) -> str:
    box.run("mkdir -m 777 /home/shown", "root", home="/")
    return box.chat_at_home("bindfs", "-o", "allow_other", box.root / "home/shown")


def fat_home(box: Box) -> str:
    image = box.root / "srv/fat.img"
    subprocess.run(["truncate", "--size=200M", image], check=True)
    subprocess.run(["mkfs.vfat", image], check=True, stdout=subprocess.DEVNULL)
    kernel_can = "vfat" in Path("/proc/filesystems").read_text().split()
    mount = ["mount", "-o", "loop,umask=0"] if kernel_can else ["fusefat", "-o", "rw+,allow_other,umask=0"]
    return box.chat_at_home(*mount, image)


def odd_path(box: Box) -> str:
    folder = "$HOME/zwölf Möbel/été 1"
    box.run(
        f'mkdir -p "{folder}" && python3 -m venv "{folder}/env"'
        f' && "{folder}/env/bin/pip" install --quiet /srv/*.whl'
    )
    box.run(f'cp /srv/tiny.gguf "{folder}/tiny ö.gguf"')
    return box.chat(f'"{folder}/env/bin/pyhobbit"', f'"{folder}/tiny ö.gguf"', locale="C")


def few_files(box: Box) -> str:
    n_parts = len([*(box.root / "srv").glob("parts-*.gguf")])
    if n_parts < N_PARTS:
        raise RuntimeError(f"only {n_parts} parts")
    return box.chat(model="/srv/parts-00001-of-*.gguf", before="ulimit -n 256")


def other_user(box: Box) -> str:
    return box.chat("/home/ada/env/bin/pyhobbit", user="bob")


def kernels(box: Box, kind: str, select: str) -> str:
    """Compares the kernels for this kind of processors with stock's, in this box that shares our files.

    select: the tests, as pytest's -k.
    """
    stock = ROOT / f"build/wheel-{machine_of(box.wheel)}/stock/bin"
    python = f"chroot {box.root} /home/ada/env/bin/python"
    options = [kind, "--python", python, "--select", select]
    command = [sys.executable, ROOT / "tests/package/variants.py", box.wheel, stock, *options]
    done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.split("|")[2].strip()


def quick_start(box: Box) -> str:
    """README's commands, each as typed. A stand-in of the Hub has the tiny model under the name there."""
    text = (ROOT / "README.md").read_text().split("## Quick start")[1].split("\n## ")[0]
    shell, python = (re.findall(f"```{name}\n(.*?)```", text, re.DOTALL) for name in ("sh", "python"))
    lines = [line.split("  #")[0].strip() for line in "".join(shell).splitlines()]
    commands = [line for line in lines if line.startswith("pyhobbit")]
    repo = next(line.split()[2] for line in commands if line.startswith("pyhobbit run"))
    model = (box.root / "srv/tiny.gguf").read_bytes()
    shutil.copy(ROOT / "tests/tiny_moe/heldout.txt", box.root / "srv")
    box.run(
        "mkdir ~/quick; cp /srv/tiny.gguf ~/quick/model.gguf; head -c 13000 /srv/heldout.txt > ~/quick/my.txt"
    )
    (box.root / "srv/quick.py").write_text("".join(python))
    with fake_hub.serving(fake_hub.Hub({repo: {f"{repo.split('/')[1]}-Q4_K_M.gguf": model}})) as hub:
        for line in [*commands, "python /srv/quick.py"]:
            command = until_healthy(line, 8080) if " serve" in line else f"{line} <<< 'def read_file(path):'"
            box.run(f"cd quick; . ~/env/bin/activate; export HF_ENDPOINT={hub.endpoint}\n{command}")
    return f"{len(commands)} commands and the Python example work as typed"


def uninstall(box: Box) -> str:
    box.run("~/env/bin/pip uninstall --quiet --yes pyhobbit")
    left = box.run("find ~/env -iname '*hobbit*' -o -name llama_cpp")
    if left:
        raise RuntimeError(f"left: {left}")
    return "nothing left"


def programs(box: Box) -> str:
    """Its programs and libraries, on a Debian whose Python is too old for it."""
    subprocess.run(
        ["python3", "-m", "zipfile", "-e", *(box.root / "srv").glob("*.whl"), box.root / "srv/wheel"],
        check=True,
    )
    box.run("chmod +x /srv/wheel/pyhobbit/bin/*", "root", home="/")
    box.run("/srv/wheel/pyhobbit/bin/llama-bench -m /srv/tiny.gguf -p 8 -n 8 -r 1")
    box.run(until_healthy("/srv/wheel/pyhobbit/bin/llama-server -m /srv/tiny.gguf --port 18439", 18439))
    return "llama-bench and llama-server run"


def until_healthy(command: str, port: int) -> str:
    """A script that runs the server until it is ready."""
    ask = "printf 'GET /health HTTP/1.0\\r\\n\\r\\n' >&3 && grep -q ok <&3"
    get = f"exec 3<>/dev/tcp/127.0.0.1/{port} && {ask}"
    end = "kill $!; wait $! || true; exit"
    wait = f"for i in {{1..60}}; do ({get}) 2>/dev/null && {{ {end}; }}; sleep 1; done"
    return f"{command} >/tmp/log 2>&1 & {wait}; cat /tmp/log; false"


STEPS: dict[Callable[[Box], str], str] = {
    bare: "`command -v gcc git`",
    install: "`pip install pyhobbit-*.whl`, `pyhobbit chat -n 1`",
    chat: "`pyhobbit chat`",
    serve: "`pyhobbit serve`, openai's client",
    read_only_home: "a read-only home",
    memory_home: "home and model on tmpfs, which reads without direct I/O",
    fuse_home: "home and model on FUSE (bindfs)",
    fat_home: "home and model on a vfat image",
    odd_path: "a path with spaces and umlauts, `LANG=C`",
    few_files: f"`ulimit -n 256`, a model in {N_PARTS} parts",
    other_user: "another user than the one who installed it",
    quick_start: "README's quick start after an installation, the tiny model in the Hub's place",
    uninstall: "`pip uninstall`",
}  # fmt: skip


EMULATED_STEPS = {
    **{step: STEPS[step] for step in (bare, install, chat, serve, few_files)},
    uninstall: STEPS[uninstall],
}


def base(suite: str, machine: str, packages: str) -> Path:
    """A Debian with these packages, as debootstrap makes it."""
    name = "-".join((suite, machine, *packages.split(",")))
    folder = BASES / name
    if not folder.exists():
        new = BASES / f"{name}.new"
        shutil.rmtree(new, ignore_errors=True)
        BASES.mkdir(parents=True, exist_ok=True)
        options = ["--variant=minbase", f"--include={packages}", f"--arch={ARCHITECTURES[machine]}"]
        command = ["debootstrap", *options, suite, new, "http://deb.debian.org/debian"]
        subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)
        new.rename(folder)
    return folder


@contextmanager
def fresh(lower: Path) -> Iterator[Path]:
    """The root of an overlay on a base. Its files are deleted only once nothing is mounted there."""
    folder = Path(tempfile.mkdtemp(dir=BASES))
    upper, work, root = (folder / name for name in ("upper", "work", "root"))
    for each in (upper, work, root):
        each.mkdir()
    layers = f"lowerdir={lower},upperdir={upper},workdir={work}"
    subprocess.run(["mount", "-t", "overlay", "-o", layers, "overlay", root], check=True)
    try:
        subprocess.run(["mount", "-t", "proc", "proc", root / "proc"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", root / "dev"], check=True)
        for name, number in DEVICES.items():
            os.mknod(root / "dev" / name, 0o666 | stat.S_IFCHR, os.makedev(1, number))
            (root / "dev" / name).chmod(0o666)
        (root / "etc/ssl/certs").mkdir(parents=True, exist_ok=True)
        for file in ("resolv.conf", "ssl/certs/ca-certificates.crt"):
            shutil.copy(f"/etc/{file}", root / "etc" / file)
        yield root
    finally:
        subprocess.run(["umount", "--recursive", root], check=True)
        shutil.rmtree(folder)


def try_suite(suite: str, wheel: Path, kinds: Sequence[str], select: str) -> None:
    machine = machine_of(wheel)
    with fresh(base(suite, machine, "python3-venv,ca-certificates")) as root:
        box = Box(root, wheel)
        for user in ("ada", "bob"):
            box.run(f"useradd --create-home {user}; chmod 755 /home/{user}", "root", home="/")
        shutil.copy(wheel, root / "srv")
        write_models(root / "srv")
        steps = STEPS if machine == platform.machine() else EMULATED_STEPS
        if suite == "bullseye":
            steps = {programs: "its programs"}
        if kinds:
            for shared in (ROOT, Path("/tmp")):
                (root / shared.relative_to("/")).mkdir(parents=True, exist_ok=True)
                box.mount("--bind", shared, root / shared.relative_to("/"))
            about = f"exactness tests whose names have {select}, kernels for"
            compare = {
                functools.partial(kernels, kind=kind, select=select): f"{about} {kind}" for kind in kinds
            }
            steps = {install: STEPS[install], **compare}
        for step, about in steps.items():
            print(f"| {SUITES[suite]} | {about} | {step(box)} |", flush=True)


def emulate(machine: str) -> None:
    """Lets the kernel run programs of another processor by qemu-user-static, until this process ends."""
    os.environ.setdefault("QEMU_CPU", "max,sve-max-vq=2")  # ggml's own layouts are for vectors of 256 bits
    formats = Path("/proc/sys/fs/binfmt_misc")
    if not (formats / "register").exists():
        subprocess.run(["mount", "-t", "binfmt_misc", "binfmt_misc", formats], check=True)
    entry = formats / f"qemu-{machine}"
    if not entry.exists():
        magic, mask = ("".join(f"\\x{byte:02x}" for byte in each) for each in EMULATED[machine])
        interpreter = shutil.which(f"qemu-{machine}-static") or sys.exit("install qemu-user-static")
        (formats / "register").write_text(f":{entry.name}:M::{magic}:{mask}:{interpreter}:F")
        atexit.register(entry.write_text, "-1")


def write_models(folder: Path) -> None:
    subprocess.run([sys.executable, ROOT / "tests/tiny_moe/to_gguf.py", folder / "tiny.gguf"], check=True)
    models.copy_gguf(folder / "tiny.gguf", folder / "parts.gguf", split_max_tensors=1)


def unshare() -> None:
    """Starts the program anew, so that its mounts end with it."""
    if os.environ.get("PYHOBBIT_UNSHARED") is None:
        command = ["unshare", "--mount", "--propagation", "private", sys.executable, *sys.argv]
        os.execvpe(command[0], command, {**os.environ, "PYHOBBIT_UNSHARED": "1"})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("suites", nargs="*", metavar="SUITE", default=[*SUITES])
    parser.add_argument("--bits", nargs="+", default=[], metavar="KIND")
    parser.add_argument("--select", default="tiny")
    args = parser.parse_args()
    unshare()
    wheel = args.wheel.resolve()
    if machine_of(wheel) != platform.machine():
        emulate(machine_of(wheel))
    print("| system | command or place | result |\n|---|---|---|")
    for suite in args.suites:
        try_suite(suite, wheel, args.bits, args.select)


if __name__ == "__main__":
    main()
