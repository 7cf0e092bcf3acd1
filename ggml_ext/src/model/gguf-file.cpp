// SPDX-License-Identifier: MIT
#include "model/gguf-file.h"

#include "base/files.h"
#include "hobbit.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <regex>
#include <sys/stat.h>

namespace fs = std::filesystem;

uint32_t hobbit_max_experts(void) {
    return LLAMA_MAX_EXPERTS;
}

// A patch defines this: key or tensor of a type that the header which this thread read last has and nobody knows.
extern const char * gguf_unknown_type(int32_t * type);

namespace hobbit {

static constexpr int      MAX_LINKS    = 40;       // as many as Linux follows
static constexpr uint64_t MOST_CLAIMED = 16 << 20; // bytes behind the end of a header that is cut; ggml allocates them

static size_t read_next(void * file, void * bytes, uint64_t, size_t n) {
    return fread(bytes, 1, n, static_cast<FILE *>(file));
}

// Says why ggml does not take the header.
static status refusal(const char * path, FILE * file) {
    const bool is_cut  = feof(file);
    uint32_t   head[2] = {}; // magic and version
    int32_t    type    = 0;
    rewind(file);
    const bool   is_empty = fread(head, 1, sizeof(head), file) == 0;
    const char * unknown  = gguf_unknown_type(&type);
    if (memcmp(head, GGUF_MAGIC, sizeof(head[0])) != 0) {
        return status::error("%s is %s", path, is_empty ? "empty: download or copy it again" : "not a GGUF file");
    }
    if (is_cut) {
        return status::error("%s is damaged: it ends in the middle of its header; download or copy it again", path)
            .because(HOBBIT_HEADER_CUT);
    }
    if ((head[1] & 0xffff) == 0) {
        return status::error("%s is for big-endian machines: convert it anew, or take another file", path);
    }
    if (head[1] < 2 || head[1] > GGUF_VERSION) {
        return status::error("%s is GGUF version %u, but only 2 and %d can be read", path, head[1], GGUF_VERSION);
    }
    return unknown ? status::error("%s cannot be read: its '%s' has the type %d, perhaps one of ik_llama.cpp's own; "
                                   "take another quantisation, or a newer pyhobbit",
                                   path, unknown, type)
                   : status::error("%s is damaged: its header contradicts itself; download or copy it again", path);
}

// Without ggml's tensors, which it would make before their dimensions are checked.
status gguf_file::read_header(std::string_view data) {
    const std::unique_ptr<FILE, int (*)(FILE *)> file(data.data()
                                                          ? fmemopen(const_cast<char *>(data.data()), data.size(), "rb")
                                                          : ggml_fopen(path_.c_str(), "rb"),
                                                      fclose);
    struct stat st = {};
    if (!file || (!data.data() && fstat(fileno(file.get()), &st) != 0)) {
        return status::error("cannot open '%s': %s", path_.c_str(), open_failure(errno).c_str())
            .because(HOBBIT_HEADER_NOT_READ);
    }
    size_ = data.data() ? size_ : st.st_size;
    errno = 0;
    gguf_.reset(gguf_init_from_callback(read_next, file.get(), 0, (data.data() ? data.size() : size_) + MOST_CLAIMED,
                                        { /* .no_alloc = */ true, /* .ctx = */ nullptr }));
    if (!gguf_ && (ferror(file.get()) || errno == ENOMEM)) {
        return status::error("cannot read '%s': %s", path_.c_str(), strerror(errno ? errno : EIO))
            .because(HOBBIT_HEADER_NOT_READ);
    }
    return gguf_ ? status() : refusal(path_.c_str(), file.get());
}

status gguf_file::open(const std::string & path, std::string_view data, uint64_t size) {
    path_ = path;
    size_ = size;
    HOBBIT_TRY(read_header(data));
    const gguf_context * gguf = gguf_.get();
    for (int64_t id = 0; id < gguf_get_n_tensors(gguf); id++) {
        const int64_t * ne   = gguf_get_tensor_ne(gguf, id);
        const char *    name = gguf_get_tensor_name(gguf, id);
        if (std::any_of(ne, ne + GGML_MAX_DIMS, [](int64_t n) { return n < 1; })) { // ggml aborts on some of these
            return status::error("'%s' is damaged: tensor '%s' has a dimension of 0; download or convert it again",
                                 path.c_str(), name);
        }
        tensors_.push_back({ name,
                             gguf_get_tensor_type(gguf, id),
                             { ne[0], ne[1], ne[2] },
                             header_bytes() + gguf_get_tensor_offset(gguf, id),
                             gguf_get_tensor_size(gguf, id) });
        const tensor & t = tensors_.back();
        if (t.offset > size_ || t.size > size_ - t.offset) {
            return status::error("'%s' is truncated: tensor '%s' ends at byte %llu of %llu; "
                                 "download or convert it again",
                                 path.c_str(), t.name.c_str(), (unsigned long long) (t.offset + t.size),
                                 (unsigned long long) size_);
        }
    }
    return {};
}

size_t gguf_file::header_bytes() const {
    return gguf_get_data_offset(gguf_.get());
}

bool gguf_file::has(const std::string & key) const {
    return gguf_find_key(gguf_.get(), key.c_str()) >= 0;
}

static bool number_at(gguf_type type, const void * data, size_t i, double & value) {
    switch (type) {
        case GGUF_TYPE_UINT8:   value = static_cast<const uint8_t *>(data)[i]; return true;
        case GGUF_TYPE_INT8:    value = static_cast<const int8_t *>(data)[i]; return true;
        case GGUF_TYPE_UINT16:  value = static_cast<const uint16_t *>(data)[i]; return true;
        case GGUF_TYPE_INT16:   value = static_cast<const int16_t *>(data)[i]; return true;
        case GGUF_TYPE_UINT32:  value = static_cast<const uint32_t *>(data)[i]; return true;
        case GGUF_TYPE_INT32:   value = static_cast<const int32_t *>(data)[i]; return true;
        case GGUF_TYPE_UINT64:  value = static_cast<const uint64_t *>(data)[i]; return true;
        case GGUF_TYPE_INT64:   value = static_cast<const int64_t *>(data)[i]; return true;
        case GGUF_TYPE_FLOAT32: value = static_cast<const float *>(data)[i]; return true;
        case GGUF_TYPE_FLOAT64: value = static_cast<const double *>(data)[i]; return true;
        case GGUF_TYPE_BOOL:    value = static_cast<const int8_t *>(data)[i]; return true;
        default:                return false;
    }
}

bool gguf_file::find_number(const std::string & key, double & value) const {
    const int64_t id = gguf_find_key(gguf_.get(), key.c_str());
    if (id < 0) {
        return false;
    }
    const gguf_context * gguf     = gguf_.get();
    const bool           is_array = gguf_get_kv_type(gguf, id) == GGUF_TYPE_ARRAY;
    const gguf_type      type     = is_array ? gguf_get_arr_type(gguf, id) : gguf_get_kv_type(gguf, id);
    const size_t         n        = is_array ? gguf_get_arr_n(gguf, id) : 1;
    if (type == GGUF_TYPE_STRING || n == 0) {
        return false;
    }
    const void * data = is_array ? gguf_get_arr_data(gguf, id) : gguf_get_val_data(gguf, id);
    bool         ok   = number_at(type, data, 0, value);
    for (size_t i = 1; ok && i < n; i++) {
        double element = 0;
        ok             = number_at(type, data, i, element);
        value          = std::max(value, element);
    }
    return ok;
}

int64_t gguf_file::find(const std::string & key, int type, int element) const {
    const int64_t id = gguf_find_key(gguf_.get(), key.c_str());
    if (id < 0 || gguf_get_kv_type(gguf_.get(), id) != type) {
        return -1;
    }
    return type != GGUF_TYPE_ARRAY || gguf_get_arr_type(gguf_.get(), id) == element ? id : -1;
}

bool gguf_file::find_u64(const std::string & key, uint64_t & value) const {
    const int64_t id = find(key, GGUF_TYPE_UINT64);
    value            = id >= 0 ? gguf_get_val_u64(gguf_.get(), id) : value;
    return id >= 0;
}

bool gguf_file::find_string(const std::string & key, std::string & value) const {
    const int64_t id = find(key, GGUF_TYPE_STRING);
    value            = id >= 0 ? gguf_get_val_str(gguf_.get(), id) : value;
    return id >= 0;
}

bool gguf_file::find_strings(const std::string & key, std::vector<std::string_view> & values) const {
    const int64_t id = find(key, GGUF_TYPE_ARRAY, GGUF_TYPE_STRING);
    for (size_t i = 0; id >= 0 && i < gguf_get_arr_n(gguf_.get(), id); i++) {
        values.emplace_back(gguf_get_arr_str(gguf_.get(), id, i));
    }
    return id >= 0;
}

std::string first_part(const std::string & path) {
    static const std::regex name("(.*)-00001-of-(\\d{5})\\.gguf");
    fs::path                at = path;
    std::string             named; // file named like a first part without a second one
    std::error_code         error;
    for (int n_links = 0; n_links < MAX_LINKS; n_links++) {
        std::smatch       match;
        const std::string file = at.string();
        if (std::regex_match(file, match, name)) {
            if (fs::exists(match.str(1) + "-00002-of-" + match.str(2) + ".gguf", error)) {
                return file;
            }
            named = named.empty() ? file : named;
        }
        const fs::path target = fs::read_symlink(at, error);
        if (error) {
            break;
        }
        at = at.parent_path() / target;
    }
    return named.empty() ? path : named;
}

// Replaces the number in PREFIX-00001-of-0000N.gguf.
static bool split_path(const std::string & first, uint32_t number, uint32_t count, std::string & path) {
    const std::string suffix = format("-%05u-of-%05u.gguf", 1u, count);
    if (first.size() <= suffix.size() || first.compare(first.size() - suffix.size(), suffix.size(), suffix) != 0) {
        return false;
    }
    path = first.substr(0, first.size() - suffix.size()) + format("-%05u-of-%05u.gguf", number + 1, count);
    return true;
}

status open_gguf_model(const std::string & path, std::vector<gguf_file> & files) {
    files.resize(1);
    HOBBIT_TRY(files[0].open(path));

    double count = 0;
    double index = 0;
    files[0].find_number("split.count", count);
    files[0].find_number("split.no", index);
    if (index != 0) {
        return status::error("'%s' is part %.0f of a split model: give its first part", path.c_str(), index + 1);
    }
    if (!(count >= 0 && count <= UINT16_MAX)) { // split.count is a uint16
        return status::error("'%s' claims to be split into %g parts: its header is damaged", path.c_str(), count);
    }
    allow_open_files(2 * uint64_t(count)); // llama.cpp's loader and ours
    const std::string first = count > 1 ? first_part(path) : path;
    for (uint32_t i = 1; i < uint32_t(count); i++) {
        std::string part;
        if (!split_path(first, i, uint32_t(count), part)) {
            return status::error("'%s' is a split model but is not named like one (NAME-00001-of-%05u.gguf)",
                                 path.c_str(), uint32_t(count));
        }
        files.emplace_back();
        HOBBIT_TRY(files.back().open(part));
        double number = 0;
        if (!files.back().find_number("split.no", number) || number != i) {
            return status::error("'%s' is not part %u of the model: download it again", part.c_str(), i + 1);
        }
    }
    return {};
}

status check_llama_header(const gguf_file & file) {
    std::string arch;
    if (!file.find_string("general.architecture", arch)) {
        return {};
    }
    const auto read = [&](const char * key, double missing) {
        double value = 0;
        return file.find_number(arch + key, value) ? value : missing;
    };
    const double n_layers  = read(".block_count", 1);
    const double n_experts = read(".expert_count", 0);
    const double n_used    = read(".expert_used_count", 0);
    const double epsilon   = read(".attention.layer_norm_rms_epsilon", 0);
    if (n_layers > LLAMA_MAX_LAYERS || n_experts > LLAMA_MAX_EXPERTS) {
        return status::
            error("'%s' has %g layers of %g experts by its header, and this llama.cpp runs at most %d layers "
                  "of %d experts: use another model, or a later version",
                  file.path().c_str(), n_layers, n_experts, LLAMA_MAX_LAYERS, LLAMA_MAX_EXPERTS);
    }
    const bool is_sound = n_layers >= 1 && n_experts >= 0 && n_used >= 0 && n_used <= n_experts &&
                          (n_experts == 0 || n_used >= 1) && epsilon >= 0;
    return is_sound ? status()
                    : status::error(format("'%s' is damaged: its header has %g layers, %g experts, %g of them used per "
                                           "token, and an epsilon of %g; download or convert it again",
                                           file.path().c_str(), n_layers, n_experts, n_used, epsilon));
}

} // namespace hobbit
