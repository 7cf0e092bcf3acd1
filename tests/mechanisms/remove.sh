#!/usr/bin/env bash
# remove.sh [NAME...]: shows that each mechanism can be removed. In a copy of the last commit, one after the other: deletes
# its two folders and its line in the list, builds, and runs the quick tests of C++ and Python, for WHOLE=NAME all tests.
# Without a NAME it takes every mechanism, and runs all tests for one of them, which the day chooses; with WHOLE=none for none.
source "$(dirname "$0")/copy.sh"
mapfile -t all < <(sed -n 's/^    \([a-z_]*\)$/\1/p' ggml_ext/mechanisms.cmake)
whole=${WHOLE:-}
if [ $# -eq 0 ]; then
    set -- "${all[@]}"
    whole=${WHOLE:-${all[$((10#$(date +%j) % ${#all[@]}))]}}
fi
for name in "$@"; do
    start=$SECONDS
    reset_copy
    git -C "$copy" rm --quiet -r ggml_ext/src/mechanisms/"$name" tests/mechanisms/"$name"
    sed -i "/^    $name\$/d" "$copy/ggml_ext/mechanisms.cmake"
    build_copy
    built=$((SECONDS - start))
    labels=(--label-exclude slow) marks='not slow and not model'
    [ "$name" = "$whole" ] && labels=() marks=''
    quietly ctest ctest --test-dir "$copy/build/release" --parallel "$jobs" --output-on-failure --no-tests=error "${labels[@]}"
    pytest_copy -m "$marks"
    printf 'without %s: built in %d s, tested in %d s: %s; %s\n' "$name" "$built" $((SECONDS - start - built)) \
        "$(grep 'tests passed' "$copy/build/ctest.log")" "$(tail -1 "$copy/build/pytest.log")"
done
