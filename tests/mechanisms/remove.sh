#!/usr/bin/env bash
# remove.sh NAME...: shows that each mechanism can be removed. In a scratch copy of the last commit, one after the other:
# deletes its two folders and its line in the list, builds the libraries and the C++ tests, and runs these. The copy,
# build/without, stays for the next call. TESTS="settings stats" builds and runs only these tests.
set -euo pipefail
cd "$(dirname "$0")/../.."
copy=build/without
commit=$(git rev-parse HEAD)
export CC=gcc CXX=g++ # ccache goes by these names, as the Makefile does
read -ra tests <<< "${TESTS:-}"
targets=("${tests[@]/#/test-}")
[ -d $copy ] || git worktree add --quiet --detach $copy "$commit"
mkdir -p $copy/vendor
cp -a vendor/llama.cpp $copy/vendor/
for name in "$@"; do
    git -C $copy checkout --quiet --force --detach "$commit"
    git -C $copy rm --quiet -r ggml_ext/src/mechanisms/"$name" tests/mechanisms/"$name"
    sed -i "/^    $name\$/d" $copy/ggml_ext/mechanisms.cmake
    cmake -S $copy -B $copy/build/release -G Ninja -DCMAKE_BUILD_TYPE=Release -DHOBBIT_BUILD_TESTS=ON \
        -DHOBBIT_WEB_PAGE=OFF > $copy/configure.log 2>&1
    cmake --build $copy/build/release --target ggml-hobbit _hobbit_c "${targets[@]:-ggml_ext/all}" > $copy/build.log ||
        { tail -30 $copy/build.log; exit 1; }
    chosen=$(IFS='|' && echo "${tests[*]}")
    ctest --test-dir $copy/build/release --tests-regex "^(${chosen:-.*})\$" > $copy/ctest.log ||
        { tail -30 $copy/ctest.log; exit 1; }
    echo "without $name: $(grep 'tests passed' $copy/ctest.log)"
done
