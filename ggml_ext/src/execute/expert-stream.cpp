// SPDX-License-Identifier: MIT
#include "execute/expert-stream.h"

#include "execute/hits-ahead.h"

#include <algorithm>
#include <cstring>

namespace hobbit {

//
// rows that no expert computes
//

// Zeroes the rows that follow the added ones.
static status clear_rows(const ggml_tensor * tensor, const std::vector<int32_t> & rows, inner_graph & inner) {
    if (rows.empty()) {
        return {};
    }
    if (!ggml_backend_buffer_is_host(root_of(tensor)->buffer)) {
        return inner.add_rows(tensor, nullptr, rows);
    }
    HOBBIT_TRY(inner.compute()); // its operations may read these rows
    for (const int32_t row : rows) {
        std::memset(static_cast<char *>(tensor->data) + size_t(row) * tensor->nb[1], 0,
                    size_t(tensor->ne[0]) * sizeof(float));
    }
    return {};
}

status clear_skipped(const ggml_tensor * tensor, const running_layer & layer, inner_graph & inner) {
    GGML_ASSERT(layer.plan.skipped.empty() || ggml_nrows(tensor) == layer.routing.n_tokens * layer.routing.n_used);
    return clear_rows(tensor, layer.plan.skipped, inner);
}

//
// rows of the sources
//

bool expert_stream::is_elsewhere(const planned_use & use) const {
    return std::any_of(sources_.begin(), sources_.end(), [&](const row_source * each) { return each->computes(use); });
}

row_source * expert_stream::due() const {
    const auto is_due = [](const row_source * each) { return each->is_due(); };
    const auto found  = std::find_if(sources_.begin(), sources_.end(), is_due);
    return found == sources_.end() ? nullptr : *found;
}

// The device runs what was added meanwhile. REQUIRES: due()
status expert_stream::compute_due(const inner_graphs & on) {
    const timeline_span span(stats_.events, "share of the CPU");
    HOBBIT_TRY(on.device.launch());
    return due()->compute_next(on);
}

status expert_stream::finish(const inner_graphs & on, bool wait) {
    while (due()) {
        HOBBIT_TRY(compute_due(on));
    }
    for (row_source * each : sources_) {
        HOBBIT_TRY(each->end_section(on.device));
    }
    return wait ? on.device.compute() : on.device.finish();
}

//
// a stage
//

// The whole layer, of which the device has computed the hits.
status expert_stream::run_behind(const running_layer & layer, const inner_graphs & on) {
    const stage whole = { {}, index_.layer(layer.routing.layer).parts };
    work        w     = { whole, layer, on, {} };
    for (const planned_use & use : layer.plan.uses) {
        if (is_elsewhere(use)) {
            continue;
        }
        const bool is_hit = layer.ahead->has(use, layer.routing) && cache_.acquire(use.id, use.tier);
        (is_hit ? held_ : w.todo).push_back(&use);
    }
    return run_all(w);
}

status expert_stream::run(const stage & st, const running_layer & layer, const inner_graphs & on) {
    if (layer.ahead) {
        return layer.done == st.parts ? run_behind(layer, on) : status();
    }
    for (const ggml_tensor * matmul : st.matmuls) {
        HOBBIT_TRY(clear_skipped(matmul, layer, on.device));
        for (const row_source * each : sources_) {
            if (!(st.parts & part_id::down)) { // operations between the products read these rows: no NaN
                HOBBIT_TRY(clear_rows(matmul, each->open_rows(), on.device));
            }
        }
    }
    work w = begin(st, layer, on);
    return run_all(w);
}

status expert_stream::run_all(work & w) {
    const status s = run_todo(w);
    for (size_t i = 0; i < w.n_pinned; i++) { // an error left these pinned
        cache_.release(w.todo[i]->id, w.todo[i]->tier);
    }
    return s;
}

// Requests what the stage needs of the experts that are pinned already.
expert_stream::work expert_stream::begin(const stage & st, const running_layer & layer, const inner_graphs & on) {
    work w = { st, layer, on, {} };
    w.todo.swap(held_);
    w.n_pinned           = w.todo.size();
    const auto is_pinned = [&](const planned_use * use) { return std::count(w.todo.begin(), w.todo.end(), use) > 0; };
    for (const planned_use & use : layer.plan.uses) {
        if (!is_elsewhere(use) && !is_pinned(&use)) {
            w.todo.push_back(&use);
        }
    }
    for (size_t i = 0; i < w.n_pinned; i++) {
        cache_.request(w.todo[i]->id, w.todo[i]->tier, st.parts);
    }
    return w;
}

status expert_stream::run_todo(work & w) {
    bool rest_is_due = w.layer.done != index_.layer(w.layer.routing.layer).parts;
    if (w.todo.empty() && rest_is_due) { // nothing is left to compute here
        HOBBIT_TRY(begin_rest(w));
    }
    while (!w.todo.empty()) {
        pin(w);
        if (w.n_pinned == 0) { // the device reads, or has read, what has the slots
            HOBBIT_TRY(w.on.device.compute());
            release(w.on.device);
            pin(w);
        }
        if (w.n_pinned == 0) { // nobody else pins anything for long
            return cache_.error().ok() ? status::error("no slot is free: the expert cache is broken") : cache_.error();
        }
        const bool all_pinned = w.n_pinned == w.todo.size();
        if (all_pinned && rest_is_due) {
            HOBBIT_TRY(begin_rest(w));
            rest_is_due = false;
        }
        HOBBIT_TRY(run_arrived(w, !all_pinned));
    }
    return {};
}

// Pins as many experts as there are slots for, and requests what the stage needs of them.
void expert_stream::pin(work & w) {
    const timeline_span span(stats_.events, "request", "experts", int64_t(w.todo.size() - w.n_pinned));
    for (; w.n_pinned < w.todo.size(); w.n_pinned++) {
        const planned_use & use = *w.todo[w.n_pinned];
        if (!cache_.acquire(use.id, use.tier)) {
            return;
        }
        cache_.request(use.id, use.tier, w.st.parts);
    }
}

// The stage has requested all it needs. The disk continues with the parts that later stages need of the pinned experts,
// and with the experts of later layers.
status expert_stream::begin_rest(const work & w) {
    const layer_id layer = w.layer.routing.layer;
    const part_set rest  = index_.layer(layer).parts - w.layer.done - w.st.parts;
    const auto &   uses  = w.layer.plan.uses;
    const auto     here  = [&](const planned_use & use) { return !is_elsewhere(use); };
    const bool     all   = w.st.parts.has(w.layer.done) &&
                     ptrdiff_t(w.todo.size() + held_.size()) == std::count_if(uses.begin(), uses.end(), here);
    const timeline_span span(stats_.events, "look ahead");
    for (const part_id part : rest) {
        const bool is_next = rest == part; // if slots are short, an expert that waits longer loses its slot before
        for (size_t i = 0; i < w.todo.size() && (all || is_next); i++) {
            cache_.request(w.todo[i]->id, w.todo[i]->tier, part);
        }
    }
    for (size_t i = 0; i < sources_.size() && all; i++) {
        HOBBIT_TRY(sources_[i]->look_ahead(w.layer, w.on.device.backend()));
    }
    return {};
}

// Waits until at least one of the pinned experts has arrived, computes all that have, and takes them out of the work.
// They stay pinned for later stages, or are released if slots are short.
status expert_stream::run_arrived(work & w, bool slots_are_short) {
    inner_graph & inner       = w.on.device;
    const auto    has_arrived = [&](const planned_use * use) { return cache_.arrived(use->id, use->tier, w.st.parts); };
    const auto    end         = w.todo.begin() + ptrdiff_t(w.n_pinned);
    const auto    none_has    = [&] { return std::none_of(w.todo.begin(), end, has_arrived); };
    while (due() && none_has()) {
        HOBBIT_TRY(compute_due(w.on));
    }
    if (none_has()) {
        HOBBIT_TRY(inner.launch());
        HOBBIT_TRY(cache_.wait(w.todo.front()->id, w.todo.front()->tier, w.st.parts));
    }
    const auto first_missing = std::stable_partition(w.todo.begin(), end, has_arrived);

    const std::vector<const planned_use *> arrived(w.todo.begin(), first_missing);
    w.todo.erase(w.todo.begin(), first_missing);
    w.n_pinned -= arrived.size();
    held_.insert(held_.end(), arrived.begin(), arrived.end());
    HOBBIT_TRY(add_products(w, arrived));
    if (slots_are_short) {
        stats_.waves++;
        HOBBIT_TRY(inner.compute());
        release(inner);
    }
    return {};
}

status expert_stream::add_products(const work & w, const std::vector<const planned_use *> & uses) {
    if (w.layer.ahead) {
        HOBBIT_TRY(w.layer.ahead->launch_missing(w.layer.routing, uses, w.on.device));
    }
    for (const ggml_tensor * matmul : w.st.matmuls) {
        HOBBIT_TRY(products_.add(matmul, w.layer.routing, uses, w.on.device));
    }
    return {};
}

void expert_stream::release(const inner_graph & device) {
    for (const planned_use * use : held_) {
        running_.push_back({ use->id, use->tier });
    }
    held_.clear();
    if (device.idle()) {
        unpin_running();
    }
}

void expert_stream::unpin_running() {
    for (const auto & [id, tier] : running_) {
        cache_.release(id, tier);
    }
    running_.clear();
}

void expert_stream::replace_running(const std::vector<expert_id> & pinned) {
    unpin_running();
    for (const expert_id id : pinned) {
        running_.push_back({ id, tier_id::high });
    }
}

} // namespace hobbit
