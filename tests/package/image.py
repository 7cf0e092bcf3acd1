# SPDX-License-Identifier: MIT
"""Makes the image of deploy/Dockerfile without docker, and tries it: python image.py WHEEL

Each stage is an overlay on a fresh Debian, in which the instructions run by chroot; the server runs as the
image's user and answers its health check. Needs what chroots.py needs. `make image-test` runs this.
"""

import json
import re
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import chroots

ROOT = chroots.ROOT
TEXT = (ROOT / "deploy/Dockerfile").read_text("utf-8").replace("\\\n", " ")
INSTRUCTIONS = re.findall(r"^([A-Z]+) (.*)$", TEXT, re.MULTILINE)
START_S = 60


class Stage:
    """The file system of one stage, and what its instructions have set."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environment = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
        }
        self.user = "root"
        self.folder = "/"
        self.words: dict[str, list[str]] = {}

    def command(self, words: list[str]) -> list[str]:
        enter = ["/bin/sh", "-c", 'cd "$0" && exec "$@"', self.folder, *words]
        return ["chroot", f"--userspec={self.user}", str(self.root), *enter]

    def inside(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def copy(self, sources: list[Path], target: str) -> None:
        for source in sources:
            into = self.inside(target) / source.name if target.endswith("/") else self.inside(target)
            into.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, into, symlinks=True)
            else:
                shutil.copy(source, into)


def build(stages: dict[str, Stage], open_root: ExitStack, wheel: Path) -> Stage:
    """Follows the Dockerfile. Raises ValueError for an instruction that it does not know."""
    stage = Stage(Path())
    for name, value in INSTRUCTIONS:
        if name == "FROM":
            suite = re.findall(r"^debian:(\w+)-slim", value)[0]
            lower = chroots.base(suite, chroots.machine_of(wheel), "apt")
            stage = Stage(open_root.enter_context(chroots.fresh(lower)))
            stages[value.split()[-1]] = stage
        elif name == "RUN":
            subprocess.run(
                stage.command(["/bin/sh", "-ec", value]),
                env=with_network(stage),
                check=True,
                stdout=subprocess.DEVNULL,
            )
        elif name == "COPY":
            *sources, target = value.split()
            if sources[0].startswith("--from="):
                stage.copy([stages[sources[0][7:]].inside(each) for each in sources[1:]], target)
            else:
                stage.copy([Path(path) for each in sources for path in ROOT.glob(each)], target)
        elif name == "ENV":
            key, text = value.split("=", 1)
            stage.environment[key] = text.replace("$PATH", stage.environment["PATH"])
        elif name == "USER":
            stage.user, stage.environment["HOME"] = value, f"/home/{value}"
        elif name == "WORKDIR":
            stage.folder = value
            stage.inside(value).mkdir(exist_ok=True)
        elif name in ("ENTRYPOINT", "CMD"):
            stage.words[name] = json.loads(value)
        elif name == "HEALTHCHECK":
            stage.words[name] = json.loads(value[value.index("[") :])
        elif name != "EXPOSE":
            raise ValueError(f"{name} is not known here")
    return stage


def with_network(stage: Stage) -> dict[str, str]:
    """Its variables, and this machine's certificates for pip, which the stage's own package would replace."""
    shutil.copy("/etc/ssl/certs/ca-certificates.crt", stage.inside("/tmp/certificates"))
    return stage.environment | {"PIP_CERT": "/tmp/certificates", "DEBIAN_FRONTEND": "noninteractive"}


def serve(image: Stage) -> None:
    chroots.write_models(image.inside("/srv"))
    shutil.move(image.inside("/srv/tiny.gguf"), image.inside(image.folder))
    command = image.command([*image.words["ENTRYPOINT"], *image.words["CMD"]])
    log = image.inside("/tmp/log")
    with log.open("w") as file:
        server = subprocess.Popen(command, env=image.environment, stdout=file, stderr=file)
    try:
        end = time.monotonic() + START_S
        check = image.command(image.words["HEALTHCHECK"])
        while subprocess.run(check, env=image.environment, capture_output=True, check=False).returncode:
            if server.poll() is not None or time.monotonic() > end:
                sys.exit(f"the server does not answer its health check:\n{log.read_text()[-3000:]}")
            time.sleep(0.5)
        answer = image.command(["python3", "-c", ASK])
        text = subprocess.run(
            answer, env=image.environment, capture_output=True, text=True, check=True
        ).stdout
    finally:
        server.terminate()
        server.wait(START_S)
    size = sum(path.lstat().st_size for path in image.inside("/opt").rglob("*"))
    print(f"the server of the image answers {text.strip()!r}; pyhobbit takes {size >> 20} MiB of it")


ASK = """
import json, urllib.request
body = {"model": "tiny", "prompt": "def read_file(path):", "n_predict": 8, "temperature": 0}
headers = {"Content-Type": "application/json"}
request = urllib.request.Request("http://127.0.0.1:8080/completion", json.dumps(body).encode(), headers)
print(json.load(urllib.request.urlopen(request, timeout=60))["content"])
"""


def main() -> None:
    wheel = Path(sys.argv[1]).resolve()
    with ExitStack() as open_root:
        serve(build({}, open_root, wheel))


if __name__ == "__main__":
    chroots.unshare()
    main()
