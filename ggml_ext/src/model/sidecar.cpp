// SPDX-License-Identifier: MIT
#include "model/sidecar.h"

#include "model/expert-index.h"

#include <algorithm>
#include <fstream>
#include <regex>

namespace hobbit {

bool is_sidecar(const gguf_file & file) {
    double value = 0;
    return file.find_number("hobbit.sidecar", value) && value != 0;
}

std::string sidecar_base_name(const gguf_file & sidecar) {
    std::string name;
    sidecar.find_string("hobbit.sidecar.base_name", name);
    return name;
}

std::string beside_model(const std::string & model_path, const char * suffix) {
    static const std::regex ending("(-\\d{5}-of-\\d{5})?\\.gguf$", // also of a part of a split model
                                   std::regex::ECMAScript | std::regex::icase);
    return std::regex_replace(model_path, ending, "") + suffix;
}

// FNV-1a, 64 bits
static uint64_t hash_bytes(uint64_t hash, const std::string & bytes) {
    for (const char c : bytes) {
        hash = (hash ^ uint8_t(c)) * 0x100000001b3ull;
    }
    return hash;
}

static status hash_tensor(const gguf_file & file, const gguf_file::tensor & t, uint64_t & hash) {
    const std::string line = format("%s|%s|%lld,%lld,%lld\n", t.name.c_str(), ggml_type_name(t.type),
                                    (long long) t.ne[0], (long long) t.ne[1], (long long) t.ne[2]);
    std::ifstream     in(file.path(), std::ios::binary);
    std::string       sample(std::min<size_t>(64, t.size), '\0');
    if (!in.seekg(std::streamoff(t.offset)).read(sample.data(), std::streamsize(sample.size()))) {
        return status::error("cannot read tensor '%s' of '%s'", t.name.c_str(), file.path().c_str());
    }
    hash = hash_bytes(hash_bytes(hash, line), sample);
    return {};
}

static status fingerprint(const std::vector<gguf_file> & model, uint64_t & hash) {
    std::vector<std::pair<const gguf_file *, const gguf_file::tensor *>> tensors;
    for (const gguf_file & file : model) {
        for (const gguf_file::tensor & t : file.tensors()) {
            if (is_base_tensor(t.name)) {
                tensors.emplace_back(&file, &t);
            }
        }
    }
    std::sort(tensors.begin(), tensors.end(),
              [](const auto & a, const auto & b) { return a.second->name < b.second->name; });

    hash = 0xcbf29ce484222325ull;
    for (const auto & [file, tensor] : tensors) {
        HOBBIT_TRY(hash_tensor(*file, *tensor, hash));
    }
    return {};
}

status check_sidecar(const gguf_file & sidecar, const std::vector<gguf_file> & model) {
    uint64_t expected_size = 0;
    uint64_t expected_hash = 0;
    if (!is_sidecar(sidecar) || !sidecar.find_u64("hobbit.sidecar.base_size", expected_size) ||
        !sidecar.find_u64("hobbit.sidecar.base_fingerprint", expected_hash)) {
        return status::error("'%s' is not a sidecar: make one with pyhobbit convert --sidecar", sidecar.path().c_str());
    }

    uint64_t size = 0;
    for (const gguf_file & file : model) {
        size += file.size();
    }
    uint64_t hash = 0;
    HOBBIT_TRY(fingerprint(model, hash));
    if (size != expected_size || hash != expected_hash) {
        return status::error("the sidecar '%s' was made for another version of '%s': make it again with "
                             "pyhobbit convert --sidecar, or remove it",
                             sidecar.path().c_str(), model[0].path().c_str());
    }
    return {};
}

} // namespace hobbit
