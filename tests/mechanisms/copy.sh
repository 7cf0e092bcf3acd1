# Sourced by remove.sh and add.sh: a scratch copy of the last commit in build/without, which stays for the next call. Each
# change of it is an incremental build.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export CC=gcc CXX=g++ CMAKE_GENERATOR=Ninja OMP_WAIT_POLICY=passive # ccache goes by the compilers' names, as in the Makefile
jobs=${JOBS:-$(nproc)}
copy=$PWD/build/without
commit=$(git rev-parse HEAD)

# An environment with the packages of ours, but for pyhobbit: that is the copy's, with its build installed beside its files.
# addsitedir() also reads the .pth file that the build installs there.
if [ ! -d "$copy/.venv" ]; then
    git worktree prune
    git worktree add --quiet --force --detach "$copy" "$commit"
    packages=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    python -m venv --without-pip "$copy/.venv"
    printf '%s\n' "import site; site.addsitedir('$copy')" "$packages" > "$copy/.venv/lib/$(basename "$(dirname "$packages")")/site-packages/copy.pth"
    mkdir -p "$copy/build"
fi
export PATH=$copy/.venv/bin:$PATH
mkdir -p "$copy/vendor"
cp -a vendor/llama.cpp vendor/*sdist* vendor/.sdist "$copy/vendor/" 2> /dev/null || true
ln -sfn "$PWD/build/stock" "$copy/build/stock"

# quietly NAME COMMAND...: shows the end of what the command says if it fails.
quietly() {
    "${@:2}" > "$copy/build/$1.log" 2>&1 || { tail -40 "$copy/build/$1.log"; exit 1; }
}

# The last commit's files.
reset_copy() {
    git -C "$copy" checkout --quiet --force --detach "$commit"
    git -C "$copy" clean --quiet --force -d -- ggml_ext llama_ext tests
}

build_copy() {
    quietly configure cmake -S "$copy" -B "$copy/build/release" -DHOBBIT_BUILD_TESTS=ON -DHOBBIT_WEB_PAGE=OFF \
        -DPython_EXECUTABLE="$copy/.venv/bin/python"
    quietly build cmake --build "$copy/build/release" --parallel "$jobs"
    quietly install cmake --install "$copy/build/release" --prefix "$copy"
    ln -sfn ../convert "$copy/pyhobbit/convert"
}

# pytest_copy ARGUMENTS...: without the test that asks for a folder with sources and no build.
pytest_copy() {
    (cd "$copy" && quietly pytest python -m pytest --numprocesses="$jobs" --maxprocesses=4 --dist=loadfile \
        --deselect tests/native/test_native.py::test_a_folder_with_sources_alone_is_one_sentence "$@")
}
