#!/usr/bin/env bash
# add.sh: shows what an addition takes. In a copy of the last commit: copies the folders of additions/ to the server, if
# they have hooks of it, else to the mechanisms, with a line in their list. Builds, and runs their tests, which use them
# from the command line, by a request and by Hobbit. Fails if another file has changed but for the list.
source "$(dirname "$0")/copy.sh"
start=$SECONDS
reset_copy
for folder in tests/mechanisms/additions/*/; do
    name=$(basename "$folder")
    into=$copy/ggml_ext/src/mechanisms/$name
    if compgen -G "$folder/server-*.cpp" > /dev/null; then
        into=$copy/llama_ext/server/$name
    else
        sed -i "s/^set(HOBBIT_MECHANISMS\$/&\n    $name/" "$copy/ggml_ext/mechanisms.cmake"
    fi
    mkdir -p "$into" "$copy/tests/mechanisms/$name"
    cp "$folder"/*.cpp "$into/"
    cp "$folder"/*.py "$copy/tests/mechanisms/$name/"
    added+=("$copy/tests/mechanisms/$name")
done
touched=$(git -C "$copy" diff --name-only)
[ "$touched" = ggml_ext/mechanisms.cmake ] || { echo "add.sh: also touched: $touched"; exit 1; }
build_copy
pytest_copy "${added[@]}"
printf 'added %s in %d s; outside their folders: %s, %s; %s\n' "$(ls tests/mechanisms/additions | paste -sd' ')" $((SECONDS - start)) \
    "$touched" "$(git -C "$copy" diff --shortstat)" "$(tail -1 "$copy/build/pytest.log")"
