#!/usr/bin/env bash
# remove.sh NAME...: shows that each mechanism can be removed. In a scratch copy of the last commit, one after the other:
# deletes its two folders and its line in the list, builds the library and the C++ tests, and runs these. The copy,
# build/without, stays for the next call. CTEST_ARGUMENTS are further arguments of ctest.
set -euo pipefail
cd "$(dirname "$0")/../.."
copy=build/without
commit=$(git rev-parse HEAD)
[ -d $copy ] || git worktree add --quiet --detach $copy HEAD
mkdir -p $copy/vendor
cp -a vendor/llama.cpp $copy/vendor/
for name in "$@"; do
    git -C $copy checkout --quiet --force --detach "$commit"
    git -C $copy rm --quiet -r ggml_ext/src/mechanisms/"$name" tests/mechanisms/"$name"
    sed -i "/^    $name\$/d" $copy/ggml_ext/mechanisms.cmake
    cmake -S $copy -B $copy/build/release -G Ninja -DCMAKE_BUILD_TYPE=Release -DHOBBIT_BUILD_TESTS=ON \
        -DHOBBIT_WEB_PAGE=OFF > $copy/configure.log
    cmake --build $copy/build/release --target ggml_ext/all hobbit-tables _hobbit_c > $copy/build.log ||
        { tail -30 $copy/build.log; exit 1; }
    # shellcheck disable=SC2086
    ctest --test-dir $copy/build/release --quiet --output-log $copy/ctest.log ${CTEST_ARGUMENTS:-} ||
        { tail -30 $copy/ctest.log; exit 1; }
    echo "without $name: $(grep 'tests passed' $copy/ctest.log)"
done
