// SPDX-License-Identifier: MIT
#include "engine/settings.h"

#include "policy/cache-policy.h"
#include "predict/predictor.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <variant>

namespace hobbit {

//
// the table
//

namespace {

using field = std::variant<bool & (*) (settings &), uint32_t & (*) (settings &), uint64_t & (*) (settings &),
                           double & (*) (settings &), std::string & (*) (settings &), compute_mode & (*) (settings &)>;

#define FIELD(type, member) [](settings & s) -> type & { return s.member; }

struct row {
    hobbit_setting_spec  spec;
    std::optional<field> in; // none: settings::registered
};

constexpr hobbit_setting_type NUMBER = HOBBIT_TYPE_NUMBER;
constexpr hobbit_setting_type COUNT  = HOBBIT_TYPE_COUNT;
constexpr hobbit_setting_type SIZE   = HOBBIT_TYPE_SIZE;
constexpr hobbit_setting_type FLAG   = HOBBIT_TYPE_FLAG;
constexpr hobbit_setting_type CHOICE = HOBBIT_TYPE_CHOICE;
constexpr hobbit_setting_type TEXT   = HOBBIT_TYPE_TEXT;
constexpr hobbit_setting_type PATH   = HOBBIT_TYPE_PATH;

constexpr const char * NONE      = nullptr;
constexpr double       MAX_BYTES = 1e18;

template <const std::vector<std::string> & (*names)()>
const char * joined() {
    static const std::string text = [] {
        std::string all;
        for (const std::string & name : names()) {
            all += (all.empty() ? "" : " ") + name;
        }
        return all;
    }();
    return text.c_str();
}

// `about`, and the names with their help.
template <typename Registered>
const char * help(const char * about) {
    static const std::string text = [&] {
        std::string all = about;
        for (const std::string & name : Registered::names()) {
            const std::string of = Registered::traits(name).help;
            all += (name == Registered::names().front() ? " " : ", ") + name + (of.empty() ? "" : " " + of);
        }
        return all + ".";
    }();
    return text.c_str();
}

template <size_t i>
const char * default_weight() {
    static const std::string text = format("%g", policy_options().weights[i]);
    return text.c_str();
}

// Columns: key, option, type, min, max, default, note on the default, choices, unit, stored; help; field.
// The order is that of the documents.
std::vector<row> own_rows() {
    return {
        { { "hobbit.memory", "memory", SIZE, 0, MAX_BYTES, NONE, "free memory less 10 %", NONE, "bytes", false,
            "Limit for the whole process, e.g. 8G." },
          FIELD(uint64_t, memory) },
        { { "hobbit.pools", "pools", SIZE, 0, MAX_BYTES, NONE, NONE, NONE, "bytes", false,
            "Size of the expert cache only, instead of a limit for the process." },
          FIELD(uint64_t, pools) },
        { { "hobbit.rule", "rule", CHOICE, 0, 0, "gate", "the calibration's", joined<rule_names>(), NONE, true,
            help<registered_rule>("Decides the precision of experts:") },
          FIELD(std::string, rule) },
        { { "hobbit.price", "price", NUMBER, 0, 1e9, "0", "the calibration's", NONE, "nats", true,
            "Rule price: quality loss accepted to save loading an expert." },
          FIELD(double, thresholds.price) },
        { { "hobbit.t1", "t1", NUMBER, 0, 1, "1", NONE, NONE, NONE, true,
            "High precision until the weights sum to t1, then the low tier; 1: all high." },
          FIELD(double, thresholds.t1) },
        { { "hobbit.t2", "t2", NUMBER, 0, 1, "1", NONE, NONE, NONE, true,
            "Low tier from t1 to t2; experts beyond t2 are skipped." },
          FIELD(double, thresholds.t2) },
        { { "hobbit.confidence", "confidence", NUMBER, 0, 1, "0", NONE, NONE, NONE, false,
            "Tokens whose best probability is not above this are computed again, all high; 0: none are." },
          FIELD(double, thresholds.confidence) },
        { { "hobbit.low_share", "low_share", NUMBER, 0, 1, NONE, "by t1", NONE, NONE, true,
            "Share of the cache reserved for low-precision experts." },
          FIELD(double, low_share) },
        { { "hobbit.policy", "policy", CHOICE, 0, 0, "echo", NONE, joined<policy_names>(), NONE, true,
            "Which experts leave a full cache." },
          FIELD(std::string, policy) },
        { { "hobbit.w_lru", "weights", NUMBER, 0, 1, default_weight<0>(), NONE, NONE, NONE, true,
            "Weights of LRU, LFU, LHU, FLD in policy hobbit." },
          FIELD(double, weights[0]) },
        { { "hobbit.w_lfu", "weights", NUMBER, 0, 1, default_weight<1>(), NONE, NONE, NONE, true,
            "The weight of LFU." },
          FIELD(double, weights[1]) },
        { { "hobbit.w_lhu", "weights", NUMBER, 0, 1, default_weight<2>(), NONE, NONE, NONE, true,
            "The weight of LHU." },
          FIELD(double, weights[2]) },
        { { "hobbit.w_fld", "weights", NUMBER, 0, 1, default_weight<3>(), NONE, NONE, NONE, true,
            "The weight of FLD." },
          FIELD(double, weights[3]) },
        { { "hobbit.prefetch", "prefetch", COUNT, 0, 4, "2", NONE, NONE, "layers", true,
            "Load experts this many layers in advance, 0 to 4." },
          FIELD(uint32_t, prefetch) },
        { { "hobbit.predictor", "predictor", CHOICE, 0, 0, "router", NONE, joined<predictor_names>(), NONE, false,
            help<registered_predictor>("Which experts are loaded in advance:") },
          FIELD(std::string, predictor) },
        { { "hobbit.io_threads", "io_threads", COUNT, 1, 256, "4", NONE, NONE, "threads", false,
            "Threads that read experts from disk." },
          FIELD(uint32_t, io_threads) },
        { { "hobbit.read_timeout", NONE, COUNT, 1, 86400, "60", NONE, NONE, "seconds", false,
            "A read that the disk has not answered by then is an error." },
          FIELD(uint32_t, read_timeout) },
        { { "hobbit.sidecar", "sidecar", PATH, 0, 0, NONE, "MODEL.hobbit.gguf", NONE, NONE, false,
            "File with the low tier." },
          FIELD(std::string, sidecar) },
        { { "hobbit.remember", "remember", FLAG, 0, 1, "0", "off", NONE, NONE, false,
            "Keep how often experts are used in MODEL.hobbit-uses, for the next start." },
          FIELD(bool, remember) },
        { { "hobbit.trace", "trace", PATH, 0, 0, NONE, NONE, NONE, NONE, false,
            "Write the routing to this file, for pyhobbit simulate." },
          FIELD(std::string, trace) },
        { { "hobbit.device", "device", TEXT, 0, 0, NONE, "as the other layers", NONE, NONE, false,
            "GPU(s) that run the experts, e.g. Vulkan0." },
          FIELD(std::string, device) },
        { { "hobbit.device_memory", "device_memory", SIZE, 0, MAX_BYTES, NONE, "free memory of the GPU", NONE, "bytes",
            false, "Limit for experts in GPU memory." },
          FIELD(uint64_t, device_memory) },
        { { "hobbit.mode", "mode", CHOICE, 0, 0, "auto", NONE, "gpu cooperative auto twiddler", NONE, false,
            "Experts not in GPU memory: copy them there (gpu), compute on the CPU (cooperative), or whichever is "
            "faster: over later tokens too (auto), or for this one alone (twiddler)." },
          FIELD(compute_mode, mode) }, // choices in the order of compute_mode
        { { "hobbit.enable", NONE, FLAG, 0, 1, "0", NONE, NONE, NONE, false,
            "Use the cache even for a model without a low tier that fits in memory." },
          FIELD(bool, enable) },
        { { "hobbit.calibrated", NONE, FLAG, 0, 1, "1", NONE, NONE, NONE, false,
            "Use MODEL.calibration.gguf where it exists." },
          FIELD(bool, calibrated) },
        { { "hobbit.strict", NONE, FLAG, 0, 1, "0", NONE, NONE, NONE, false,
            "Give each token exactly the precision that the rule decides, whatever is resident: to measure quality." },
          FIELD(bool, strict) },
        { { "hobbit.pack", NONE, FLAG, 0, 1, "1", NONE, NONE, NONE, false,
            "Keep experts in the layout that the CPU multiplies fastest, as llama.cpp does with other weights." },
          FIELD(bool, pack) },
    };
}

// Settings of mechanisms come last.
const std::vector<row> & table() {
    static const std::vector<row> rows = [] {
        std::vector<row> all = own_rows();
        for (const auto & each : registered_setting::all()) {
            all.push_back({ each.second, {} });
        }
        return all;
    }();
    return rows;
}

const row * find_row(const std::string & key) {
    for (const row & each : table()) {
        if (key == each.spec.key) {
            return &each;
        }
    }
    return nullptr;
}

bool takes_text(const hobbit_setting_spec & spec) {
    return spec.type == HOBBIT_TYPE_CHOICE || spec.type == HOBBIT_TYPE_TEXT || spec.type == HOBBIT_TYPE_PATH;
}

status set(settings & s, const row & to, double value) {
    const hobbit_setting_spec & spec = to.spec;
    if (takes_text(spec)) {
        return status::error("%s takes a text", spec.key);
    }
    const bool is_flag = spec.type == HOBBIT_TYPE_FLAG;
    if (!std::isfinite(value) || (!is_flag && (value < spec.min || value > spec.max))) {
        return status::error("%s is %g: it must lie between %g and %g", spec.key, value, spec.min, spec.max);
    }
    if (!to.in) {
        s.registered[spec.key] = is_flag ? value != 0 : value;
        return {};
    }
    std::visit(
        [&](auto in) {
            using type = std::decay_t<decltype(in(s))>;
            if constexpr (std::is_same_v<type, bool>) {
                in(s) = value != 0;
            } else if constexpr (std::is_arithmetic_v<type>) {
                in(s) = type(value);
            }
        },
        *to.in);
    return {};
}

// The place of `value` among names that are separated by spaces, or -1.
int find_choice(const char * choices, const std::string & value) {
    const std::string all = std::string(" ") + choices + " ";
    const size_t      at  = value.find(' ') == std::string::npos ? all.find(" " + value + " ") : std::string::npos;
    return at == std::string::npos ? -1 : int(std::count(all.begin(), all.begin() + at, ' '));
}

status set(settings & s, const row & to, const std::string & value) {
    const hobbit_setting_spec & spec = to.spec;
    if (!takes_text(spec)) {
        return status::error("%s takes a number, not the text '%s'", spec.key, value.c_str());
    }
    const int chosen = spec.choices ? find_choice(spec.choices, value) : 0;
    if (chosen < 0) {
        return status::error("%s is '%s': choose one of %s", spec.key, value.c_str(), spec.choices);
    }
    std::visit(
        [&](auto in) {
            using type = std::decay_t<decltype(in(s))>;
            if constexpr (std::is_same_v<type, std::string>) {
                in(s) = value;
            } else {
                in(s) = type(chosen);
            }
        },
        *to.in);
    return {};
}

constexpr const char * WEIGHT_KEYS[] = { "hobbit.w_lru", "hobbit.w_lfu", "hobbit.w_lhu", "hobbit.w_fld" };

bool is_weight(const std::string & key) {
    return std::find(std::begin(WEIGHT_KEYS), std::end(WEIGHT_KEYS), key) != std::end(WEIGHT_KEYS);
}

} // namespace

//
// settings
//

settings::settings() {
    for (const row & each : table()) {
        if (const char * value = each.spec.default_value) {
            const status s = takes_text(each.spec) ? set(*this, each, std::string(value))
                                                   : set(*this, each, std::strtod(value, nullptr));
            GGML_ASSERT(s.ok());
        }
    }
}

std::vector<std::string> settings::stored_keys() {
    std::vector<std::string> keys;
    for (const row & each : table()) {
        if (each.spec.is_stored) {
            keys.push_back(each.spec.key);
        }
    }
    return keys;
}

bool settings::asked() const {
    static const char * const keys[] = { "hobbit.memory", "hobbit.pools",         "hobbit.t1",  "hobbit.t2",
                                         "hobbit.price",  "hobbit.device_memory", "hobbit.mode" };
    return enable || !device.empty() || !sidecar.empty() || !trace.empty() ||
           std::any_of(std::begin(keys), std::end(keys), [&](const char * key) { return is_given(key); });
}

status settings::apply_one(const hobbit_setting & setting) {
    const std::string key = setting.key;
    const row *       to  = find_row(key);
    if (!to) {
        return status::error("unknown setting %s", key.c_str());
    }
    if (setting.kind == HOBBIT_SETTING_STRING) {
        return set(*this, *to, std::string(setting.s));
    }
    if (is_weight(key) && !weights_given()) {
        weights = {}; // the others are 0 unless they are given too
    }
    return set(*this, *to, setting.kind == HOBBIT_SETTING_FLOAT ? setting.f : double(setting.i));
}

status settings::apply(const hobbit_setting * given, size_t n_given) {
    for (size_t i = 0; i < n_given; i++) {
        HOBBIT_TRY(apply_one(given[i]));
        given_.insert(given[i].key);
    }
    if (is_given("hobbit.t2") && !is_given("hobbit.t1")) {
        thresholds.t1 = std::min(1.0, thresholds.t2);
    }
    if (!is_given("hobbit.rule")) {
        rule = is_given("hobbit.price") ? "price" : thresholds_given() ? "gate" : rule;
    }
    if (names_rank() && !thresholds_given()) {
        // MoBiLE's little model, in which no expert is low
        thresholds.t1 = thresholds.t2 = 0.5;
        low_share                     = is_given("hobbit.low_share") ? low_share : 0.0;
    }
    if (weights_given() && !is_given("hobbit.policy")) {
        policy = "hobbit";
    } else if (weights_given() && policy != "hobbit") {
        return status::error("the weights w_lru, w_lfu, w_lhu and w_fld belong to the policy 'hobbit', but "
                             "hobbit.policy is '%s'",
                             policy.c_str());
    }
    return check();
}

bool settings::weights_given() const {
    return std::any_of(std::begin(WEIGHT_KEYS), std::end(WEIGHT_KEYS), [&](const char * k) { return is_given(k); });
}

bool settings::thresholds_given() const {
    return is_given("hobbit.t1") || is_given("hobbit.t2");
}

// A stored rule and its numbers do not apply if the caller gave a rule or numbers of another one.
status settings::apply_stored(const stored_settings & stored) {
    const bool given_rule   = is_given("hobbit.rule") || is_given("hobbit.price") || thresholds_given();
    const bool given_policy = is_given("hobbit.policy") || weights_given();
    for (const auto & [key, value] : stored) {
        if (key == "hobbit.rule" && !given_rule && std::holds_alternative<std::string>(value)) {
            rule = std::get<std::string>(value);
        }
    }
    for (const auto & [key, value] : stored) {
        const bool is_threshold = key == "hobbit.t1" || key == "hobbit.t2";
        const bool is_left_out  = (key == "hobbit.rule" && given_rule) || (key == "hobbit.low_share" && names_rank()) ||
                                 (key == "hobbit.price" && !takes_price(rule)) ||
                                 (is_threshold && (thresholds_given() || names_rank() || takes_price(rule))) ||
                                 ((key == "hobbit.policy" || is_weight(key)) && given_policy);
        if (is_given(key) || is_left_out) {
            continue;
        }
        const row * to = find_row(key);
        if (!to || !to->spec.is_stored) {
            return status::error("%s is not a setting that a file may store", key.c_str());
        }
        const status s = std::visit([&](const auto & v) { return set(*this, *to, v); }, value);
        if (!s.ok()) {
            return s;
        }
    }
    return check();
}

status settings::set_thresholds(const score_thresholds & t) {
    const std::pair<const char *, double> numbers[] = {
        { "hobbit.t1", t.t1 }, { "hobbit.t2", t.t2 }, { "hobbit.price", t.price }, { "hobbit.confidence", t.confidence }
    };
    status s;
    for (const auto & [key, value] : numbers) {
        s = s.ok() ? set(*this, *find_row(key), value) : s;
    }
    return s.ok() ? check() : s;
}

double settings::low_demand() const {
    return takes_price(rule) ? (thresholds.price > 0.0 ? 1.0 : 0.0) : 1.0 - thresholds.t1;
}

status settings::check() const {
    if (takes_price(rule) && thresholds.t1 < 1.0) {
        return status::error("hobbit.t1 and hobbit.t2 belong to the rule gate, and the rule here is %s: give "
                             "hobbit.price in their place, or hobbit.rule gate",
                             rule.c_str());
    }
    if (!takes_price(rule) && thresholds.price > 0.0) {
        return status::error("hobbit.price belongs to the rule price, and the rule here is %s: give hobbit.t1 "
                             "and hobbit.t2 in its place, or hobbit.rule price",
                             rule.c_str());
    }
    if (thresholds.t1 > thresholds.t2) {
        return status::error("hobbit.t1 (%g) must not be above hobbit.t2 (%g): between the two, experts are "
                             "used in low precision",
                             thresholds.t1, thresholds.t2);
    }
    const double sum = weights[0] + weights[1] + weights[2] + weights[3];
    if (!(std::fabs(sum - 1.0) < 1e-6)) {
        return status::error("the weights w_lru, w_lfu, w_lhu and w_fld sum to %g: they must sum to 1", sum);
    }
    return {};
}

} // namespace hobbit

const struct hobbit_setting_spec * hobbit_setting_spec_at(size_t i) {
    const auto & rows = hobbit::table();
    return i < rows.size() ? &rows[i].spec : nullptr;
}
