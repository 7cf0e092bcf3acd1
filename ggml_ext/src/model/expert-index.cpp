// SPDX-License-Identifier: MIT
#include "model/expert-index.h"

#include "model/sidecar.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <numeric>
#include <sys/stat.h>

namespace hobbit {

static const per_part<const char *> PART_NAMES = { { "ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps",
                                                     "ffn_down_exps" } };

namespace {

// The name of a routed expert tensor: blk.N.PART.weight, or blk.N.PART.TIER.GROUP.weight for one of a further tier.
struct tensor_name {
    uint32_t    block = 0;
    part_id     part  = {};
    std::string tier; // empty under llama.cpp's own names
    uint32_t    group = 0;
};

} // namespace

// False for every other name; `out` is then undefined.
static bool parse_tensor_name(const std::string & name, tensor_name & out) {
    char part[64] = "";
    char rest[64] = "";
    if (name.size() >= 64 || sscanf(name.c_str(), "blk.%u.%63[^.].%63s", &out.block, part, rest) != 3) {
        return false;
    }
    const auto found =
        std::find_if(PART_NAMES.begin(), PART_NAMES.end(), [&](const char * p) { return strcmp(p, part) == 0; });
    if (found == PART_NAMES.end()) {
        return false;
    }
    out.part      = part_id(found - PART_NAMES.begin());
    char tier[64] = "";
    out.tier.clear();
    if (sscanf(rest, "%63[^.].%u.weight", tier, &out.group) == 2) {
        out.tier = tier;
    }
    // sscanf also takes blanks, signs and leading zeros
    const std::string stem = format("blk.%u.%s.", out.block, part);
    return name == stem + (out.tier.empty() ? "weight" : format("%s.%u.weight", tier, out.group));
}

bool is_base_tensor(const std::string & name) {
    tensor_name parsed;
    return parse_tensor_name(name, parsed) && parsed.tier.empty();
}

bool is_tier_tensor(const std::string & name) {
    tensor_name parsed;
    return parse_tensor_name(name, parsed) && !parsed.tier.empty();
}

const expert_tensor * expert_index::find_tensor(const std::string & name) const {
    tensor_name parsed;
    if (!parse_tensor_name(name, parsed) || !parsed.tier.empty()) {
        return nullptr;
    }
    for (const layer_shape & layer : layers_) {
        if (layer.block == parsed.block && (layer.parts & parsed.part)) {
            return &layer.tensors[parsed.part];
        }
    }
    return nullptr;
}

//
// opening
//

static status read_format(const gguf_file & file, tier_format & of_file);

status expert_index::open(const std::string & path, const std::string & sidecar) {
    std::vector<gguf_file> files;
    HOBBIT_TRY(open_gguf_model(path, files));
    if (is_sidecar(files[0])) {
        return status::error("'%s' holds only further tiers of '%s': give that file as the model", path.c_str(),
                             sidecar_base_name(files[0]).c_str());
    }
    for (const gguf_file & file : files) {
        model_bytes_ += file.size();
        HOBBIT_TRY(check_llama_header(file));
        read_metadata(file);
    }
    HOBBIT_TRY(read_format(files[0], format_));
    HOBBIT_TRY(add_base(files));
    if (layers_.empty()) {
        return {};
    }
    find_embedding(files);
    HOBBIT_TRY(open_sidecar(path, sidecar, files));
    for (const gguf_file & file : files) {
        files_.push_back(file.path());
        const stored_settings stored = find_settings(file, stored_keys_);
        stored_.insert(stored_.end(), stored.begin(), stored.end());
    }
    return add_tiers(files);
}

status expert_index::open_sidecar(const std::string & path, const std::string & sidecar,
                                  std::vector<gguf_file> & files) const {
    const std::string name = sidecar.empty() ? beside_model(path, ".hobbit.gguf") : sidecar;
    if (sidecar.empty()) {
        struct stat st;
        if (files[0].has("hobbit.tiers") || stat(name.c_str(), &st) != 0) {
            return {};
        }
    } else if (files[0].has("hobbit.tiers")) {
        return status::error("'%s' has tiers of its own: do not give it a sidecar", path.c_str());
    }

    gguf_file    file;
    const status s = file.open(name);
    if (!s.ok()) {
        return status::error("%s; it should be the sidecar of '%s': make one with pyhobbit convert --sidecar",
                             s.message().c_str(), path.c_str());
    }
    HOBBIT_TRY(check_sidecar(file, files));
    files.push_back(std::move(file));
    return {};
}

void expert_index::read_metadata(const gguf_file & file) {
    std::string arch;
    double      n_used = 0;
    double      width  = 0;
    if (file.find_string("general.architecture", arch) && file.find_number(arch + ".expert_used_count", n_used)) {
        architecture_   = arch;
        n_experts_used_ = uint32_t(n_used);
        width_          = file.find_number(arch + ".embedding_length", width) ? uint32_t(width) : 0;
    }
}

status expert_index::read_calibration(const std::string & path) {
    HOBBIT_TRY(calibration_.read(path, *this, stored_keys_));
    stored_.insert(stored_.end(), calibration_.settings.begin(), calibration_.settings.end());
    return {};
}

// Three dimensions, none of them empty. Also keeps the number of experts below what 32 bits hold.
static bool is_expert_stack(const gguf_file::tensor & t) {
    return t.size > 0 && t.ne[0] > 0 && t.ne[1] > 0 && t.ne[2] > 0 && t.ne[2] <= INT32_MAX &&
           t.size == ggml_row_size(t.type, t.ne[0]) * uint64_t(t.ne[1]) * uint64_t(t.ne[2]);
}

status expert_index::add_base(const std::vector<gguf_file> & files) {
    const bool in_groups = !format_.base; // groups then add up to all experts of a layer
    std::map<uint32_t, std::pair<layer_shape, layer_locations>> blocks;
    for (uint32_t i = 0; i < files.size(); i++) {
        for (const gguf_file::tensor & t : files[i].tensors()) {
            tensor_name name;
            if (!parse_tensor_name(t.name, name) || (!name.tier.empty() && !in_groups)) {
                continue;
            }
            if (!is_expert_stack(t)) {
                return status::error("'%s': tensor '%s' is not a stack of expert matrices", files[i].path().c_str(),
                                     t.name.c_str());
            }
            auto & [shape, locations] = blocks[name.block];
            if (!in_groups && (shape.parts & name.part)) {
                return status::error("'%s': tensor '%s' is in the model twice", files[i].path().c_str(),
                                     t.name.c_str());
            }
            shape.block              = name.block;
            shape.n_used             = n_experts_used_;
            shape.parts             |= name.part;
            shape.shapes[name.part]  = { t.ne[0], t.ne[1] };
            const uint64_t stride    = t.size / t.ne[2];
            for (int64_t e = 0; e < t.ne[2]; e++) {
                locations[name.part].push_back({ i, t.offset + e * stride, stride, t.type });
            }
        }
    }
    for (auto & [block, layer] : blocks) {
        if (!(layer.first.parts & part_id::down) || !(layer.first.parts - part_id::down)) {
            return status::error("'%s': layer %u lacks some of its expert tensors", files[0].path().c_str(), block);
        }
        layer.first.n_experts = uint32_t(layer.second[part_id::down].size());
        for (const part_id p : layer.first.parts) {
            if (layer.second[p].size() != layer.first.n_experts) {
                return status::error("'%s': blk.%u.%s has %zu experts, and %s of its layer %u", files[0].path().c_str(),
                                     block, PART_NAMES[p], layer.second[p].size(), PART_NAMES[part_id::down],
                                     layer.first.n_experts);
            }
        }
        for (const part_id p : part_set::all()) {
            layer.first.tensors[p] = { layer_id(layers_.size()), p };
        }
        layers_.push_back(layer.first);
        locations_[tier_id::high].push_back(std::move(layer.second));
    }
    return {};
}

void expert_index::find_embedding(const std::vector<gguf_file> & files) {
    embedding_table found;
    bool            has_output = false;
    for (uint32_t i = 0; i < files.size(); i++) {
        for (const gguf_file::tensor & t : files[i].tensors()) {
            has_output = has_output || t.name == "output.weight";
            if (t.name == embedding_table::name) {
                found = { { i, t.offset, t.size, t.type }, { t.ne[0], t.ne[1] } };
            }
        }
    }
    if (has_output) {
        embedding_ = found;
    }
}

//
// further tiers
//

// Version 1: both tiers have all experts.
static status check_low(const expert_index & index, const std::string & path) {
    for (const layer_id layer : index.layers()) {
        for (const part_id part : index.layer(layer).parts) {
            for (uint32_t e = 0; e < index.layer(layer).n_experts; e++) {
                if (index.locate(tier_id::low, layer, part, e).size == 0) {
                    return status::error("'%s': the low tier lacks expert %u of blk.%u.%s: convert the model again",
                                         path.c_str(), e, index.layer(layer).block, PART_NAMES[part]);
                }
            }
        }
    }
    return {};
}

static const registered_format complete("1", nullptr, { tier_id::high, "complete", "complete", check_low });

// Reads the format of the tiers that a file declares, if any are declared.
static status read_format(const gguf_file & file, tier_format & of_file) {
    const char *                  path = file.path().c_str();
    std::vector<std::string_view> names;
    if (!file.find_strings("hobbit.tiers", names)) {
        const auto is_of_tier = [](const gguf_file::tensor & t) { return is_tier_tensor(t.name); };
        return file.has("hobbit.version") || std::any_of(file.tensors().begin(), file.tensors().end(), is_of_tier)
                   ? status::error(format("'%s' has tiers but does not declare them in hobbit.tiers: it is damaged, "
                                          "convert it again",
                                          path))
                   : status();
    }
    double version = 0;
    file.find_number("hobbit.version", version);
    of_file = registered_format::traits(format("%g", version));
    if (!of_file.check) {
        std::string known;
        for (const std::string & name : registered_format::names()) {
            known += (known.empty() ? "" : ", ") + name;
        }
        return status::error("'%s' is of hobbit format version %g, this program reads version%s %s", path, version,
                             registered_format::names().size() > 1 ? "s" : "", known.c_str());
    }
    if (names != std::vector<std::string_view>{ "high", "low" }) {
        return status::error("'%s' declares other tiers than high and low: convert it again", path);
    }
    struct key_text {
        const char * key;
        const char * wanted;
        std::string  found; // at first what stands for an absent key
    };
    const bool is_usual = of_file.base == tier_id::high;
    key_text   texts[]  = { { "hobbit.tier.low.kind", of_file.low, "" },
                            { "hobbit.tier.high.kind", of_file.high, "complete" },
                            { "hobbit.base_tier", of_file.base ? tier_name(*of_file.base) : "none",
                           is_usual ? "high" : "" } };
    for (auto & [key, wanted, found] : texts) {
        file.find_string(key, found);
        if (found != wanted) {
            return status::error("'%s': %s is '%s', and with format version %g it is '%s': convert it again", path, key,
                                 found.c_str(), version, wanted);
        }
    }
    return {};
}

status expert_index::add_tiers(const std::vector<gguf_file> & files) {
    for (uint32_t i = 0; i < files.size(); i++) {
        HOBBIT_TRY(read_format(files[i], format_));
        if (!format_.check) {
            continue;
        }
        const std::vector<layer_locations> base = std::move(locations_[tier_id::high]);
        for (const tier_id tier : TIERS) {
            locations_[tier] = base;
            for (layer_id l = 0; l < layers_.size() && tier != format_.base; l++) {
                for (std::vector<part_location> & experts : locations_[tier][l]) {
                    experts.assign(experts.size(), {});
                }
            }
        }
        for (const gguf_file::tensor & t : files[i].tensors()) {
            HOBBIT_TRY(is_tier_tensor(t.name) ? add_group(files[i], i, t) : status());
        }
        return format_.check(*this, files[i].path());
    }
    return {};
}

status expert_index::add_group(const gguf_file & file, uint32_t file_number, const gguf_file::tensor & tensor) {
    tensor_name name;
    parse_tensor_name(tensor.name, name);
    const std::string     stem = tensor.name.substr(0, tensor.name.find('.', tensor.name.find("ffn_")));
    const expert_tensor * of   = find_tensor(stem + ".weight");
    const tier_id         tier = name.tier == tier_name(tier_id::low) ? tier_id::low : tier_id::high;
    if (name.tier != tier_name(tier) || tier == format_.base || !of) {
        return status::error("'%s': tensor '%s' belongs to no expert tensor of the model, or to no further tier",
                             file.path().c_str(), tensor.name.c_str());
    }

    const layer_shape &  shape = layers_[of->layer];
    const matrix_shape & base  = shape.shapes[of->part];
    std::vector<int32_t> experts;
    const std::string    key = format("hobbit.tier.%s.%s.%u.experts", name.tier.c_str(), stem.c_str(), name.group);
    if (!file.has(key)) {
        for (uint32_t e = 0; e < shape.n_experts; e++) {
            experts.push_back(e);
        }
    } else if (!file.find_array(key, experts)) {
        return status::error("'%s': %s must be an array of 32-bit integers", file.path().c_str(), key.c_str());
    }
    if (!is_expert_stack(tensor) || tensor.ne[0] != base.n_in || tensor.ne[1] != base.n_out ||
        tensor.ne[2] != int64_t(experts.size())) {
        return status::error("'%s': tensor '%s' has shape %lld x %lld x %lld, the model asks for "
                             "%lld x %lld x %zu: convert the model again",
                             file.path().c_str(), tensor.name.c_str(), (long long) tensor.ne[0],
                             (long long) tensor.ne[1], (long long) tensor.ne[2], (long long) base.n_in,
                             (long long) base.n_out, experts.size());
    }

    const uint64_t stride = tensor.size / experts.size();
    for (size_t i = 0; i < experts.size(); i++) {
        if (experts[i] < 0 || uint32_t(experts[i]) >= shape.n_experts) {
            return status::error("'%s': tensor '%s' names expert %d of %u", file.path().c_str(), tensor.name.c_str(),
                                 experts[i], shape.n_experts);
        }
        part_location & location = locations_[tier][of->layer][of->part][experts[i]];
        if (location.size != 0) {
            return status::error("'%s': tensor '%s' repeats expert %d", file.path().c_str(), tensor.name.c_str(),
                                 experts[i]);
        }
        location = { file_number, tensor.offset + i * stride, stride, tensor.type };
    }
    return {};
}

//
// sums
//

serving expert_index::serving() const {
    return format_.served ? [this](expert_id id, precision given) { return format_.served(*this, id, given); }
                          : hobbit::serving();
}

uint32_t expert_index::n_held(tier_id tier, layer_id first, layer_id last) const {
    uint32_t n = 0;
    each_matrix(tier, [&](expert_id, part_id part, const part_location &) { n += part == part_id::down; }, first, last);
    return n;
}

void expert_index::set_run_blocks(uint32_t n_blocks) {
    for (layer_shape & layer : layers_) {
        layer.is_run = layer.block < n_blocks;
    }
}

std::vector<layer_id> expert_index::layers() const {
    std::vector<layer_id> all(n_layers());
    std::iota(all.begin(), all.end(), 0);
    return all;
}

std::vector<uint32_t> expert_index::experts_by_layer() const {
    std::vector<uint32_t> n;
    for (const layer_shape & layer : layers_) {
        n.push_back(layer.n_experts);
    }
    return n;
}

uint32_t expert_index::n_experts() const {
    uint32_t most = 0;
    for (const layer_shape & layer : layers_) {
        most = std::max(most, layer.n_experts);
    }
    return most;
}

void expert_index::set_experts_used(const uint32_t * of_blocks, size_t n_blocks) {
    n_experts_used_ = 0;
    for (layer_shape & layer : layers_) {
        layer.n_used    = layer.block < n_blocks ? of_blocks[layer.block] : layer.n_used;
        n_experts_used_ = std::max(n_experts_used_, layer.n_used);
    }
}

uint64_t expert_index::tier_bytes(tier_id tier, layer_id first, layer_id last) const {
    uint64_t bytes = 0;
    each_matrix(tier, [&](expert_id, part_id, const part_location & at) { bytes += at.size; }, first, last);
    return bytes;
}

uint64_t expert_index::expert_bytes(expert_id id, tier_id tier) const {
    uint64_t bytes = 0;
    for (const part_id part : layer(id.layer).parts) {
        bytes += locate(tier, id.layer, part, id.expert).size;
    }
    return bytes;
}

double expert_index::token_bytes(tier_id tier) const {
    double sum = 0;
    for (layer_id l = 0; l < locations_[tier].size(); l++) {
        const double bytes  = double(tier_bytes(tier, l, l));
        sum                += bytes > 0 && layers_[l].is_run ? bytes / n_held(tier, l, l) * layers_[l].n_used : 0;
    }
    return sum;
}

} // namespace hobbit
