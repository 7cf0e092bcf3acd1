// SPDX-License-Identifier: MIT
#include "engine/settings.h"

#include "policy/cache-policy.h"
#include "predict/predictor.h"

#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <set>

namespace hobbit {

//
// the table
//

namespace {

constexpr hobbit_setting_type NUMBER = HOBBIT_TYPE_NUMBER;
constexpr hobbit_setting_type COUNT  = HOBBIT_TYPE_COUNT;
constexpr hobbit_setting_type SIZE   = HOBBIT_TYPE_SIZE;
constexpr hobbit_setting_type FLAG   = HOBBIT_TYPE_FLAG;
constexpr hobbit_setting_type CHOICE = HOBBIT_TYPE_CHOICE;
constexpr hobbit_setting_type TEXT   = HOBBIT_TYPE_TEXT;
constexpr hobbit_setting_type PATH   = HOBBIT_TYPE_PATH;

constexpr const char * NONE      = nullptr;
constexpr double       MAX_BYTES = 1e18;

// The table's texts live for ever. REQUIRES: while the table is made
const char * kept(const std::string & text) {
    static std::set<std::string> all;
    return all.insert(text).first->c_str();
}

template <typename Registered>
const char * joined() {
    std::string all;
    for (const std::string & name : Registered::names()) {
        all += (all.empty() ? "" : " ") + name;
    }
    return kept(all);
}

// `about`, and the names with their help.
template <typename Registered>
const char * help(const char * about) {
    std::string all;
    for (const std::string & name : Registered::names()) {
        const std::string of  = Registered::traits(name).help;
        all                  += (all.empty() ? " " : ", ") + name + (of.empty() ? "" : " " + of);
    }
    return kept(about + all + ".");
}

const char * default_weight(size_t i) {
    return kept(format("%g", policy_options().weights[i]));
}

constexpr const char * WEIGHTS      = "hobbit.w_lru hobbit.w_lfu hobbit.w_lhu hobbit.w_fld";
constexpr const char * POLICY       = "hobbit.policy hobbit.w_lru hobbit.w_lfu hobbit.w_lhu hobbit.w_fld";
constexpr const char * OTHER_BOUNDS = "hobbit.memory hobbit.device_memory";
constexpr const char * POOLS        = "hobbit.pools";

// `first`, and the keys of the numbers that ask for precision, or of all.
std::string number_keys(const char * first, bool all = false) {
    std::string keys = first;
    for (const rule_number * each : rule_number::all()) {
        keys += all || each->asks_for_precision() ? std::string(" ") + each->spec.key : "";
    }
    return keys;
}

constexpr const char * RULE = "hobbit.rule"; // keys that exclude each other's stored values, with number_keys
constexpr const char * RULE_AND_QUALITY = "hobbit.quality hobbit.rule";

// The rows, and behind hobbit.rule those of numbers.
std::vector<hobbit_setting_spec> with_number_rows(std::vector<hobbit_setting_spec> rows) {
    auto at = std::find_if(rows.begin(), rows.end(), [](auto & row) { return row.key == std::string("hobbit.rule"); });
    for (const rule_number * each : rule_number::all()) {
        at              = rows.insert(at + 1, each->spec);
        at->replaced_by = each->asks_for_precision() ? kept(number_keys(RULE_AND_QUALITY)) : QUALITY;
    }
    return rows;
}

// Columns: key, option, type, min, max, default, note on the default, choices, unit, stored, live, replaced by; help.
// The order is that of the documents.
std::vector<hobbit_setting_spec> core_rows() {
    return with_number_rows({
        { "hobbit.memory", "memory", SIZE, 0, MAX_BYTES, NONE, "free memory less 10 %, or 2 GiB by a display", NONE,
          "bytes", false, false, POOLS, "Limit for the whole process, e.g. 8G." },
        { "hobbit.pools", "pools", SIZE, 0, MAX_BYTES, NONE, NONE, NONE, "bytes", false, false, OTHER_BOUNDS,
          "Size of the expert cache only, instead of a limit for the process." },
        { "hobbit.further", NONE, SIZE, 0, MAX_BYTES, NONE, NONE, NONE, "bytes", false, false, NONE,
          "Memory that the pools leave to contexts after the first, such as a draft head's." },
        { "hobbit.process", NONE, SIZE, 0, MAX_BYTES, NONE, NONE, NONE, "bytes", false, false, NONE,
          "Memory that the process holds which opens the model, in place of what this one holds." },
        { "hobbit.requests", NONE, SIZE, 0, MAX_BYTES, NONE, NONE, NONE, "bytes", false, false, NONE,
          "Memory that the pools leave to a server's requests while it reads them." },
        { QUALITY, "quality", CHOICE, 0, 0, NONE, "small-loss if calibrated or stored in the file, else lossless",
          QUALITY_WORDS, NONE, false, true, kept(number_keys(RULE, true)),
          "Chooses rule, thresholds and price: no loss, the loss that the calibration allowed, or more of it for "
          "speed." },
        { "hobbit.rule", "rule", CHOICE, 0, 0, "gate", "the calibration's", joined<registered_rule>(), NONE, true,
          false, kept(number_keys(RULE_AND_QUALITY)), help<registered_rule>("Decides the precision of experts:") },
        { "hobbit.low_share", "low_share", NUMBER, 0, 1, NONE, "by t1", NONE, NONE, true, false, NONE,
          "Share of the cache reserved for low-precision experts." },
        { "hobbit.policy", "policy", CHOICE, 0, 0, "echo", NONE, joined<registered_policy>(), NONE, true, false, POLICY,
          "The eviction policy." },
        { "hobbit.w_lru", "weights", NUMBER, 0, 1, default_weight(0), NONE, NONE, NONE, true, false, WEIGHTS,
          "Weights of LRU, LFU, LHU, FLD in policy hobbit." },
        { "hobbit.w_lfu", "weights", NUMBER, 0, 1, default_weight(1), NONE, NONE, NONE, true, false, WEIGHTS,
          "The weight of LFU." },
        { "hobbit.w_lhu", "weights", NUMBER, 0, 1, default_weight(2), NONE, NONE, NONE, true, false, WEIGHTS,
          "The weight of LHU." },
        { "hobbit.w_fld", "weights", NUMBER, 0, 1, default_weight(3), NONE, NONE, NONE, true, false, WEIGHTS,
          "The weight of FLD." },
        { "hobbit.prefetch", "prefetch", COUNT, 0, 4, "2", NONE, NONE, "layers", true, false, NONE,
          "Load experts this many layers in advance, 0 to 4." },
        { "hobbit.prefetch_trials", NONE, FLAG, 0, 1, "1", NONE, NONE, NONE, false, false, NONE,
          "Pause prefetch while measured time says that it does not pay." },
        { "hobbit.predictor", "predictor", CHOICE, 0, 0, "router", NONE, joined<registered_predictor>(), NONE, false,
          false, NONE, help<registered_predictor>("Predicts the experts to load in advance:") },
        { "hobbit.prefetch_bar", "prefetch_bar", NUMBER, 0, 1, "0", NONE, NONE, NONE, false, false, NONE,
          "Prefetch only experts of at least this probability (predictors paths, paths-exact)." },
        { "hobbit.io_threads", "io_threads", COUNT, 1, 256, "4", NONE, NONE, "threads", false, false, NONE,
          "Threads that read experts from disk." },
        { "hobbit.read_timeout", NONE, COUNT, 1, 86400, "60", NONE, NONE, "seconds", false, false, NONE,
          "A read that the disk has not answered by then is an error." },
        { "hobbit.snapshots", NONE, COUNT, 0, 1e6, "0", NONE, NONE, NONE, false, false, NONE,
          "Most snapshots of a sequence's state for which memory is left, as far as it reaches." },
        { "hobbit.least_snapshots", NONE, COUNT, 0, 1e6, "0", NONE, NONE, NONE, false, false, NONE,
          "Snapshots that must fit into memory; otherwise opening fails." },
        { "hobbit.sidecar", "sidecar", PATH, 0, 0, NONE, "MODEL.hobbit.gguf", NONE, NONE, false, false, NONE,
          "File with the low tier." },
        { "hobbit.trace", "trace", PATH, 0, 0, NONE, NONE, NONE, NONE, false, false, NONE,
          "Write the routing to this file, for pyhobbit simulate." },
        { "hobbit.timeline", "timeline", PATH, 0, 0, NONE, NONE, NONE, NONE, false, false, NONE,
          "Write what the engine's threads do to this file, for Perfetto or Chrome." },
        { "hobbit.device", "device", TEXT, 0, 0, NONE, "as the other layers", NONE, NONE, false, false, NONE,
          "GPU(s) that run the experts, e.g. Vulkan0." },
        { "hobbit.device_memory", "device_memory", SIZE, 0, MAX_BYTES, NONE, "free memory of the GPU", NONE, "bytes",
          false, false, POOLS, "Limit for experts in GPU memory." },
        { "hobbit.mode", "mode", CHOICE, 0, 0, "auto", NONE, "gpu cooperative auto twiddler", NONE, false, false, NONE,
          "Experts not in GPU memory: copy them there (gpu), compute on the CPU (cooperative), or whichever is "
          "faster: over later tokens too (auto), or for this one alone (twiddler)." },
        { "hobbit.placement", "placement", CHOICE, 0, 0, "measured", NONE, "measured cache layers", NONE, false, false,
          NONE,
          "If RAM and GPU memory hold the model, use the cache, whole layers on the GPU as by llama.cpp's "
          "--n-cpu-moe, or the faster one, measured once." },
        { "hobbit.enable", NONE, FLAG, 0, 1, "0", NONE, NONE, NONE, false, false, NONE,
          "Use the cache even for a model without a low tier that fits in memory." },
        { "hobbit.calibrated", NONE, FLAG, 0, 1, "1", NONE, NONE, NONE, false, false, NONE,
          "Use MODEL.calibration.gguf where it exists." },
        { "hobbit.strict", "strict", FLAG, 0, 1, "0", "off", NONE, NONE, false, false, NONE,
          "Give each token exactly the precision that the rule decides, whatever is resident." },
        { "hobbit.pack", NONE, FLAG, 0, 1, "1", NONE, NONE, NONE, false, false, NONE,
          "Keep experts in the layout that the CPU multiplies fastest, as llama.cpp does with other weights." },
    });
}

const bool is_registered = register_first_settings(core_rows);

// The thresholds are those of Mixtral-8x7B, section 3.2.
const bool is_hobbit = register_paper(
    { "hobbit", "a low tier", "rule=gate t1=0.6 t2=0.9 policy=hobbit predictor=router mode=cooperative" });

} // namespace

// The stored division of the pools that was fitted to a rule.
static std::string share_key(const std::string & rule_name) {
    return "hobbit." + rule_name + ".low_share";
}

// The options of a rule's numbers.
static std::string options_of(const std::string & rule_name, const char * separator, const char * prefix = "") {
    std::string all;
    for (const rule_number * each : numbers_of(rule_name)) {
        all += (all.empty() ? prefix : separator) + std::string(each->spec.option);
    }
    return all;
}

std::vector<std::string> settings::stored_keys() {
    std::vector<std::string> keys;
    for (const hobbit_setting_spec & each : setting_table()) {
        if (each.is_stored) {
            keys.push_back(each.key);
        }
    }
    for (const std::string & name : registered_rule::names()) {
        keys.push_back(share_key(name));
    }
    for (const rule_number * each : rule_number::all()) {
        keys.push_back(std::string("hobbit.fast.") + each->spec.option);
    }
    return keys;
}

rule_numbers settings::thresholds() const {
    rule_numbers numbers;
    for (const rule_number * each : rule_number::all()) {
        numbers[*each] = number(each->spec.key);
    }
    return numbers;
}

std::array<double, 4> settings::weights() const {
    return { number("hobbit.w_lru"), number("hobbit.w_lfu"), number("hobbit.w_lhu"), number("hobbit.w_fld") };
}

// The setting's choices are in the order of compute_mode.
compute_mode settings::mode() const {
    return compute_mode(find_word(find_setting("hobbit.mode")->choices, text("hobbit.mode")));
}

double settings::low_share() const {
    return at("hobbit.low_share").has_value ? number("hobbit.low_share") : -1.0;
}

budget settings::bounds() const {
    return { memory(),
             pools(),
             count("hobbit.device_memory"),
             low_share(),
             low_demand(rule(), thresholds()),
             at(t1_number.spec.key).source == HOBBIT_SOURCE_FILE,
             uint32_t(count("hobbit.snapshots")),
             uint32_t(count("hobbit.least_snapshots")) };
}

bool settings::asked() const {
    return flag("hobbit.enable") || text("hobbit.placement") == "cache" || !device().empty() ||
           !text("hobbit.sidecar").empty() || !text("hobbit.trace").empty() || !text("hobbit.timeline").empty() ||
           any_given("hobbit.memory hobbit.pools hobbit.device_memory hobbit.mode") ||
           any_given(number_keys("").c_str());
}

status settings::apply(const hobbit_setting * given, size_t n_given) {
    std::string keys;
    for (size_t i = 0; i < n_given; i++) {
        HOBBIT_TRY(give(given[i]));
        keys += std::string(" ") + given[i].key;
    }
    HOBBIT_TRY(check_quality(keys));
    HOBBIT_TRY(move_limits(keys));
    HOBBIT_TRY(derive());
    return check();
}

// Moves a number that limits another one, or is limited by it, where the other one alone is given. keys: those given
status settings::move_limits(const std::string & keys) {
    for (const rule_number * low : rule_number::all()) {
        const rule_number * high = low->limit ? rule_number::find(low->limit) : nullptr;
        if (!high || number(low->spec.key) <= number(high->spec.key)) {
            continue;
        }
        const bool gives_low = find_word(keys.c_str(), low->spec.key) >= 0;
        if (gives_low != (find_word(keys.c_str(), high->spec.key) >= 0)) {
            const rule_number & given = gives_low ? *low : *high;
            HOBBIT_TRY(set((gives_low ? high : low)->spec.key, number(given.spec.key), HOBBIT_SOURCE_COMPUTED,
                           std::string("as ") + given.spec.option + " is given"));
        }
    }
    return {};
}

// Gives settings that the caller left out the values that follow from those given.
status settings::derive() {
    const auto follow = [&](const char * key, const setting_value & value, const std::string & note) {
        return is_given(key) ? status() : set(key, value, HOBBIT_SOURCE_COMPUTED, note);
    };
    std::string owner; // the rule of a number that is given
    for (const rule_number * each : rule_number::all()) {
        owner = owner.empty() && is_given(each->spec.key) ? each->rule : owner;
    }
    if (!owner.empty()) {
        HOBBIT_TRY(follow("hobbit.rule", owner, "as " + options_of(owner, " or ") + " is given"));
    }
    const rule_traits traits = registered_rule::traits(rule());
    if (is_given("hobbit.rule") && traits.own_value >= 0.0 && !any_given(traits.numbers)) {
        for (const rule_number * each : numbers_of(rule())) {
            HOBBIT_TRY(follow(each->spec.key, traits.own_value, "the rule's"));
        }
        HOBBIT_TRY(follow("hobbit.low_share", 0.0, "the rule's"));
    }
    if (any_given(WEIGHTS)) {
        HOBBIT_TRY(follow("hobbit.policy", "hobbit", "as weights are given"));
        for (const hobbit_setting_spec & row : setting_table()) {
            if (find_word(WEIGHTS, row.key) >= 0) {
                HOBBIT_TRY(follow(row.key, 0.0, "as other weights are given"));
            }
        }
    }
    return {};
}

// Returns true if a stored value does not apply beside those given. rule_name: the rule that the model gets
bool settings::is_overruled(const std::string & key, const std::string & rule_name) const {
    if (rule_number::find(key)) {
        const rule_traits traits = registered_rule::traits(rule_name);
        return find_word(traits.numbers, key) < 0 || any_given(traits.numbers) ||
               (is_given("hobbit.rule") && traits.own_value >= 0.0);
    }
    if (key == "hobbit.low_share") { // it is fitted to the stored numbers
        return any_given(registered_rule::traits(rule_name).numbers);
    }
    const hobbit_setting_spec * row = find_setting(key);
    return row && (key == "hobbit.rule" ? any_given(number_keys(RULE).c_str()) : any_given(row->replaced_by));
}

status settings::apply_stored(const stored_settings & stored, size_t n_in_model) {
    std::string stored_rule = find_setting("hobbit.rule")->default_value; // the stored numbers were fitted to it
    for (const auto & [key, value] : stored) {
        const auto * name = std::get_if<std::string>(&value);
        stored_rule       = key == "hobbit.rule" && name ? *name : stored_rule;
    }
    const std::string rule_name = any_given(number_keys(RULE).c_str()) ? rule() : stored_rule;
    for (size_t i = 0; i < stored.size(); i++) {
        auto [key, value] = stored[i];
        if (key == share_key(rule_name)) {
            key = "hobbit.low_share";
        } else if (key == "hobbit.low_share" ? rule_name != stored_rule : key.find(".low_share") != std::string::npos) {
            continue; // it is another rule's
        }
        if (const auto * fitted = std::get_if<double>(&value)) {
            fitted_[key]   = *fitted;
            is_calibrated_ = i >= n_in_model;
        }
        if (key.rfind("hobbit.fast.", 0) == 0) {
            continue; // applies where the quality asks for it
        }
        const hobbit_setting_spec * row = find_setting(key);
        if (!row || !row->is_stored) {
            return status::error("%s is not a setting that a file may store", key.c_str());
        }
        const bool in_model = i < n_in_model;
        if (is_given(key)) {
            continue;
        }
        if (!is_overruled(key, rule_name)) {
            HOBBIT_TRY(set(key, value, in_model ? HOBBIT_SOURCE_FILE : HOBBIT_SOURCE_CALIBRATION));
        } else if (at(key).note.empty()) {
            note(key, format("the %s's does not apply", in_model ? "model file" : "calibration"));
        }
    }
    return check();
}

status settings::change(const hobbit_setting * changes, size_t n_changes) {
    std::string keys;
    for (size_t i = 0; i < n_changes; i++) {
        HOBBIT_TRY(give(changes[i]));
        if (!find_setting(changes[i].key)->is_live) {
            return status::error("%s cannot be changed while the model is open", changes[i].key);
        }
        keys += std::string(" ") + changes[i].key;
    }
    HOBBIT_TRY(check_quality(keys));
    if (find_word(keys.c_str(), QUALITY) >= 0) {
        HOBBIT_TRY(apply_quality());
    } else if (!precision_number(keys).empty()) {
        clear(QUALITY);
    }
    HOBBIT_TRY(move_limits(keys));
    if (const rule_number * other = number_of_another_rule()) {
        return status::error("this model runs by %s: restart with --set rule=%s to use %s",
                             options_of(rule(), " and ").c_str(), other->rule.c_str(),
                             options_of(other->rule, " and ").c_str());
    }
    return check();
}

std::string settings::note_on(const std::string & key) const {
    if (key == "hobbit.low_share" && low_share() < 0.0) {
        const double demand = low_demand(rule(), thresholds());
        return demand > 0 ? format("%g slots for each of the high pool", demand) : "no use of the low tier";
    }
    return at(key).note;
}

void settings::describe(hobbit_resolved_setting * rows, size_t n_rows) const {
    for (size_t i = 0; i < n_rows && i < setting_table().size(); i++) {
        const hobbit_setting_spec &   spec = setting_table()[i];
        const setting_values::entry & e    = at(spec.key);
        hobbit_resolved_setting &     row  = rows[i];

        row           = {};
        row.source    = e.source;
        row.has_value = e.has_value && (policy() == "hobbit" || find_word(WEIGHTS, spec.key) < 0);
        row.number    = is_text(spec) ? 0.0 : std::get<double>(e.value);
        snprintf(row.text, sizeof(row.text), "%s", is_text(spec) ? std::get<std::string>(e.value).c_str() : "");
        snprintf(row.note, sizeof(row.note), "%s", note_on(spec.key).c_str());
    }
}

// A number that asks for less than all high, and that the rule does not know. Null: none.
const rule_number * settings::number_of_another_rule() const {
    for (const rule_number * each : rule_number::all()) {
        const bool is_known = find_word(registered_rule::traits(rule()).numbers, each->spec.key) >= 0;
        if (each->asks_for_precision() && !is_known && number(each->spec.key) != each->exact) {
            return each;
        }
    }
    return nullptr;
}

//
// settings that contradict each other
//

status settings::check() const {
    if (any_given(WEIGHTS) && policy() != "hobbit") {
        return status::error("the weights w_lru, w_lfu, w_lhu and w_fld belong to the policy 'hobbit', but "
                             "hobbit.policy is '%s'",
                             policy().c_str());
    }
    if (const rule_number * other = number_of_another_rule()) {
        const bool are_several = numbers_of(other->rule).size() > 1;
        return status::
            error("%s belong%s to the rule %s, and the rule here is %s: give %s in %s place, or hobbit.rule %s",
                  options_of(other->rule, " and hobbit.", "hobbit.").c_str(), are_several ? "" : "s",
                  other->rule.c_str(), rule().c_str(), options_of(rule(), " and hobbit.", "hobbit.").c_str(),
                  are_several ? "their" : "its", other->rule.c_str());
    }
    for (const rule_number * each : rule_number::all()) {
        if (each->limit && number(each->spec.key) > number(each->limit)) {
            return status::
                error("%s (%g) must not be above %s (%g): between the two, experts are used in low precision",
                      each->spec.key, number(each->spec.key), each->limit, number(each->limit));
        }
    }
    if (number("hobbit.device_memory") > 0 && pools() > 0) {
        return status::error("hobbit.device_memory limits all that experts take on a GPU and hobbit.pools the cache "
                             "alone: give one of them");
    }
    const std::array<double, 4> w   = weights();
    const double                sum = std::accumulate(w.begin(), w.end(), 0.0);
    if (!(std::fabs(sum - 1.0) < 1e-6)) {
        return status::error("the weights w_lru, w_lfu, w_lhu and w_fld sum to %g: they must sum to 1", sum);
    }
    return {};
}

status settings::check_placed(bool is_apart, bool on_cpu) const {
    if (number("hobbit.device_memory") > 0 && !is_apart) {
        return status::error("hobbit.device_memory limits a GPU's own memory, and the experts are in the host's: name "
                             "a GPU with hobbit.device, or give hobbit.memory");
    }
    if (is_given("hobbit.mode") && !is_apart && (on_cpu || mode() != compute_mode::gpu)) {
        return status::error("hobbit.mode divides the experts between the CPU and a GPU with memory of its own: name a "
                             "GPU with hobbit.device, or leave it out");
    }
    if (memory() > 0 && pools() > 0 && !is_apart) {
        return status::error("hobbit.memory limits the whole process and hobbit.pools the expert cache alone, in the "
                             "same memory: give one of them");
    }
    return check_registered_settings(*this, is_apart);
}

} // namespace hobbit
