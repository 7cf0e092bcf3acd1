// SPDX-License-Identifier: MIT
#include "fixtures/numbers.h"
#include "fixtures/prefetch-fixture.h"

#include <random>
#include <string>
#include <thread>
#include <vector>

TEST_CASE("what the next layer is predicted to miss is read ahead, the most wanted first, and judged") {
    engine e({ { 1, 0, { { 3, 0.3f }, { 5, 0.6f } } }, { 2, 0, { { 1, 0.5f }, { 2, 0.5f } } } });
    e.reader.open_gate();
    e.choose(0, { 0, 1 });
    e.cache().wait({ 0, 0 }, tier_id::high, ALL);
    e.cache().wait({ 0, 1 }, tier_id::high, ALL);
    const size_t demanded = e.reader.begun().size();
    e.look_ahead();
    e.wait({ 1, 3 });
    e.wait({ 1, 5 });
    const std::vector<uint64_t> begun = e.reader.begun();
    CHECK(std::vector<uint64_t>(begun.begin() + ptrdiff_t(demanded), begun.end()) ==
          joined(e.reads_of({ 1, 5 }), e.reads_of({ 1, 3 })));
    CHECK_FALSE(e.cache().holds({ 2, 1 }, tier_id::high, {})); // layer 1 had something missing
    e.finish(0, { 0, 1 });

    const uint64_t bytes = e.counters.bytes_read;
    e.choose(1, { 3, 6 });
    CHECK(e.counters.predicted == 2);
    CHECK(e.counters.predicted_right == 1);
    CHECK(e.counters.prefetched == 2);
    CHECK(e.counters.prefetched_used == 1);
    e.cache().wait({ 1, 6 }, tier_id::high, ALL);
    CHECK(e.counters.bytes_prefetched * 3 == bytes + e.counters.bytes_prefetched); // 2 of 4 experts
    e.finish(1, { 3, 6 });
}

TEST_CASE("what is read ahead goes to the cache of its layer, over the border between two") {
    engine e({ { 1, 0, { { 3, 0.3f }, { 5, 0.6f } } } }, 2, 0, {}, 3, 1);
    e.reader.open_gate();
    e.choose(0, { 0, 1 });
    e.look_ahead();
    for (const expert_id id : { expert_id{ 1, 3 }, { 1, 5 } }) {
        CHECK(e.cache_of(1).holds(id, tier_id::high, ALL));
        CHECK_FALSE(e.cache_of(0).holds(id, tier_id::high, {}));
        e.wait(id);
    }
    e.finish(0, { 0, 1 });
    CHECK_FALSE(e.cache_of(1).prefetch({ 2, 0 }, tier_id::high, ALL)); // those two are protected
    const uint64_t read = e.counters.bytes_read;
    e.prefetch->on_routing({ 1, 1, N_USED, { 3, 5 }, {} });
    CHECK(e.counters.prefetched_used == 2);
    CHECK(e.counters.bytes_read == read);
    CHECK(e.cache_of(1).prefetch({ 2, 0 }, tier_id::high, ALL));
}

TEST_CASE("over the border nothing is read ahead into a low pool that is on this side alone") {
    engine e({ { 1, 0, { { 3, 0.3f }, { 5, 0.6f } } } }, 4, 4, numbers(0.5, 1.0), 3, 1);
    e.reader.open_gate();
    e.choose(0, { 0, 1 });
    e.look_ahead();
    for (const expert_id id : { expert_id{ 1, 3 }, { 1, 5 } }) {
        CHECK(e.cache_of(1).holds(id, tier_id::high, ALL));
        e.wait(id);
    }
    e.finish(0, { 0, 1 });
}

TEST_CASE("a layer that has all it needs is protected, and the one behind it looked at") {
    engine e({ { 1, 0, { { 3, 0.3f }, { 5, 0.6f } } }, { 2, 0, { { 1, 0.5f }, { 2, 0.4f } } } }, 6);
    e.reader.open_gate();
    e.load({ 1, 3 });
    e.load({ 1, 5 });
    e.choose(0, { 0, 1 });
    e.look_ahead();
    CHECK(e.cache().holds({ 2, 1 }, tier_id::high, ALL));
    CHECK(e.cache().holds({ 2, 2 }, tier_id::high, ALL));
    e.finish(0, { 0, 1 });

    // the pool is full: those not predicted leave first, though they were used last
    e.load({ 3, 0 });
    e.load({ 3, 1 });
    for (const expert_id id : { expert_id{ 1, 3 }, { 1, 5 }, { 2, 1 }, { 2, 2 } }) {
        CHECK(e.cache().holds(id, tier_id::high, ALL));
    }
    // until their layer's router has chosen
    e.choose(1, { 3, 5 });
    e.finish(1, { 3, 5 });
    e.load({ 3, 2 });
    e.load({ 3, 3 });
    e.load({ 3, 4 });
    CHECK_FALSE(e.cache().holds({ 1, 3 }, tier_id::high, {}));
    CHECK(e.cache().holds({ 2, 1 }, tier_id::high, ALL));
    CHECK(e.cache().holds({ 2, 2 }, tier_id::high, ALL));
}

TEST_CASE("what is prefetched takes no slot of what is predicted for the same layer") {
    engine e({ { 1, 0, { { 5, 0.6f }, { 6, 0.3f } } } }, 4);
    e.reader.open_gate();
    e.load({ 1, 6 }); // the oldest
    e.load({ 3, 0 });
    e.run_layer(0, { 0, 1 });
    CHECK(e.cache().holds({ 1, 5 }, tier_id::high, ALL));
    CHECK(e.cache().holds({ 1, 6 }, tier_id::high, ALL));
    CHECK_FALSE(e.cache().holds({ 3, 0 }, tier_id::high, {}));
}

TEST_CASE("it looks no further than it was told, and not past the last layer") {
    const std::vector<belief> beliefs = { { 2, 0, { { 1, 0.5f }, { 2, 0.4f } } }, { 0, 0, { { 6, 0.5f } } } };
    engine                    e(beliefs, 16, 0, {}, 1);
    e.reader.open_gate();
    e.load({ 1, 0 });
    e.load({ 1, 1 }); // layer 1's prediction: nothing tells its experts apart
    e.choose(0, { 0, 1 });
    e.look_ahead();
    CHECK_FALSE(e.cache().holds({ 2, 1 }, tier_id::high, {}));
    e.finish(0, { 0, 1 });
    const size_t n_reads = e.reader.begun().size();
    e.run_layer(3, { 0, 1 });
    CHECK(e.reader.begun().size() == n_reads + 6);
    CHECK_FALSE(e.cache().holds({ 0, 6 }, tier_id::high, {})); // the next token's
}

TEST_CASE("predicted weights choose the precision, and a better resident one serves") {
    const rule_numbers        thresholds = numbers(0.5, 0.85);
    const std::vector<belief> beliefs    = {
        { 1, 0, { { 3, 0.7f }, { 5, 0.3f } } }, // scores 0 and 0.7: high and low
        { 1, 1, { { 3, 0.9f }, { 6, 0.1f } } }, // 0 and 0.9: high and skipped
    };
    engine e(beliefs, 8, 8, thresholds);
    e.reader.open_gate();
    e.run_layer(0, { 0, 1 });
    CHECK(e.cache().holds({ 1, 3 }, tier_id::high, ALL));
    CHECK(e.cache().holds({ 1, 5 }, tier_id::low, ALL));
    CHECK_FALSE(e.cache().holds({ 1, 5 }, tier_id::high, {}));

    engine better(beliefs, 8, 8, thresholds);
    better.reader.open_gate();
    better.load({ 1, 5 });
    better.run_layer(0, { 0, 1 });
    CHECK_FALSE(better.cache().holds({ 1, 5 }, tier_id::low, {}));

    engine skipped(beliefs, 8, 8, thresholds);
    skipped.reader.open_gate();
    skipped.run_layer(0, { 0, 1 }, { 1 });
    CHECK(skipped.cache().holds({ 1, 3 }, tier_id::high, ALL));
    CHECK_FALSE(skipped.cache().holds({ 1, 6 }, tier_id::low, {}));
    CHECK_FALSE(skipped.cache().holds({ 1, 6 }, tier_id::high, {}));
    skipped.choose(1, { 3, 6 });
    CHECK(skipped.counters.predicted_right == 2); // also named
    CHECK(skipped.counters.prefetched == 1);

    engine        own(beliefs, 8, 8, thresholds); // a sequence that asks for everything in high precision
    const int32_t sequence = 7;
    const int32_t position = 1;
    const int8_t  output   = 1;
    own.thresholds.set(sequence, {});
    own.batch.begin(1, &sequence, &position, &output);
    own.reader.open_gate();
    own.run_layer(0, { 0, 1 });
    CHECK(own.cache().holds({ 1, 5 }, tier_id::high, ALL));

    engine no_low(beliefs, 8, 0, thresholds);
    no_low.reader.open_gate();
    no_low.run_layer(0, { 0, 1 });
    CHECK(no_low.cache().holds({ 1, 5 }, tier_id::high, ALL));
}

TEST_CASE("of several tokens the one that asks for most decides, and the most wanted fit") {
    const std::vector<belief> beliefs = {
        { 1, 0, { { 3, 0.7f }, { 5, 0.3f } } },
        { 1, 1, { { 5, 0.8f }, { 6, 0.2f } } },
        { 1, 2, { { 3, 0.6f }, { 7, 0.4f } } },
    };
    engine all(beliefs, 8, 8, numbers(0.5, 1.0));
    all.reader.open_gate();
    all.run_layer(0, { 0, 1, 0, 1, 0, 1 }, { 0, 1, 2 });
    CHECK(all.cache().holds({ 1, 3 }, tier_id::high, ALL));
    CHECK(all.cache().holds({ 1, 5 }, tier_id::high, ALL)); // low for the first token
    CHECK(all.cache().holds({ 1, 6 }, tier_id::low, ALL));
    CHECK(all.cache().holds({ 1, 7 }, tier_id::low, ALL));

    // summed weights 1.3, 1.1, 0.4, 0.2; two slots are the demand's
    for (uint32_t room = 0; room <= 4; room++) {
        CAPTURE(room);
        engine some(beliefs, 2 + room);
        some.reader.open_gate();
        some.run_layer(0, { 0, 1, 0, 1, 0, 1 }, { 0, 1, 2 });
        const uint32_t by_want[] = { 3, 5, 7, 6 };
        for (uint32_t i = 0; i < 4; i++) {
            CHECK(some.cache().holds({ 1, by_want[i] }, tier_id::high, ALL) == (i < room));
        }
        CHECK(some.cache().holds({ 0, 0 }, tier_id::high, ALL));
    }
}

TEST_CASE("a wrong prefetch costs the one read in flight, and a right one is not read twice") {
    engine e({ { 1, 0, { { 3, 0.3f }, { 5, 0.6f } } } });
    e.choose(0, { 0, 1 });
    e.reader.let(6);
    e.cache().wait({ 0, 0 }, tier_id::high, ALL);
    e.cache().wait({ 0, 1 }, tier_id::high, ALL);
    e.look_ahead();
    e.reader.wait_begun(7); // the first part of expert 5
    e.finish(0, { 0, 1 });

    e.choose(1, { 3, 6 });
    e.reader.open_gate();
    e.cache().wait({ 1, 3 }, tier_id::high, ALL);
    e.cache().wait({ 1, 6 }, tier_id::high, ALL);
    e.finish(1, { 3, 6 });
    CHECK(e.reader.begun().size() == 7 + 6);
    CHECK(e.reader.begun()[6] == e.reads_of({ 1, 5 })[0]);
    CHECK_FALSE(e.cache().holds({ 1, 5 }, tier_id::high, ALL));
    e.load({ 1, 5 }); // the part that is there is kept
    CHECK(e.reader.begun().size() == 7 + 6 + 2);
}

TEST_CASE("a predictor that needs no routers prefetches what it learnt from the layers that ran") {
    engine e({}, 4, 0, {}, 1, N_LAYERS, "repeat");
    e.reader.open_gate();
    CHECK(e.counters.prefetch_active);
    for (const layer_id layer : { 0, 1, 2, 3 }) {
        e.run_layer(layer, { 2 * int32_t(layer), 2 * int32_t(layer) + 1 });
    }
    CHECK(e.counters.predicted == 0); // no layer ran before
    CHECK_FALSE(e.cache().holds({ 1, 2 }, tier_id::high, {}));
    e.run_layer(0, { 0, 1 });
    CHECK(e.cache().holds({ 1, 2 }, tier_id::high, ALL));
    CHECK(e.cache().holds({ 1, 3 }, tier_id::high, ALL));
    e.run_layer(1, { 3, 7 });
    CHECK(e.counters.predicted == 2);
    CHECK(e.counters.predicted_right == 1);
    CHECK(e.counters.prefetched == 2);
    CHECK(e.counters.prefetched_used == 1);
}

TEST_CASE("layers that never run are not predicted after the first pass") {
    engine e({ { 1, 0, { { 0, 0.5f }, { 1, 0.5f } } },
               { 2, 0, { { 0, 0.5f }, { 1, 0.5f } } },
               { 3, 0, { { 3, 0.3f }, { 5, 0.6f } } } });
    e.reader.open_gate();
    for (int i = 0; i < 5; i++) {
        e.counters.misses[tier_id::high]++;
        for (layer_id layer = 0; layer < N_LAYERS - 1; layer++) { // as with layers for speculation
            e.run_layer(layer, { 0, 1 });
        }
    }
    CHECK(e.counters.prefetched == 2 + 2 + 2); // layers 1 and 2, and once for nothing
    CHECK(e.counters.prefetched_used == 4);
    CHECK(e.counters.predicted == 5 * 4 + 2);
}

TEST_CASE("nothing is predicted while nothing misses, and again in the pass after a miss") {
    engine e({ { 1, 0, { { 3, 0.3f }, { 5, 0.6f } } } });
    e.reader.open_gate();
    const auto predicts = [&](uint64_t n_misses) {
        const uint64_t before             = e.counters.predicted;
        e.counters.misses[tier_id::high] += n_misses;
        e.run_layer(0, { 0, 1 });
        e.run_layer(1, { 3, 5 });
        return e.counters.predicted > before;
    };
    CHECK(predicts(2)); // and prefetches
    CHECK(predicts(0));
    CHECK(predicts(0));
    CHECK_FALSE(predicts(0));
    CHECK_FALSE(predicts(0));
    CHECK(predicts(1) != predicts(1)); // one of the governor's pair
}

TEST_CASE("prefetch is declined where the routers or their input are not known") {
    engine no_routers({});
    CHECK_FALSE(no_routers.counters.prefetch_active);
    no_routers.reader.open_gate();
    no_routers.run_layer(0, { 0, 1 });
    CHECK(no_routers.counters.predicted == 0);

    for (const int64_t width : { int64_t(0), WIDTH / 2 }) {
        engine e({ { 1, 0, { { 3, 0.3f }, { 5, 0.6f } } } });
        e.reader.open_gate();
        CHECK(e.counters.prefetch_active);
        e.choose(0, { 0, 1 });
        engine::with_tensor(WIDTH / 2, 1, std::vector<float>(WIDTH), [&](const ggml_tensor * input) {
            const layer_routing routing = { 0, 1, N_USED, { 0, 1 }, {} };
            REQUIRE(e.prefetch->look_ahead({ routing, {}, width > 0 ? input : nullptr, {} }, e.backend()).ok());
        });
        e.finish(0, { 0, 1 });
        CHECK_FALSE(e.counters.prefetch_active);
        e.run_layer(1, { 0, 1 }); // declined for good
        e.run_layer(0, { 0, 1 });
        CHECK(e.counters.bytes_prefetched == 0);
        CHECK_FALSE(e.counters.prefetch_active);
    }
}

TEST_CASE("a prefetch that fails is an error of the next wait, and everything may be released") {
    engine e({ { 1, 0, { { 3, 0.3f }, { 5, 0.6f } } } }, 4);
    e.reader.fail_at(e.reads_of({ 1, 5 })[1], "the disk is gone");
    e.choose(0, { 0, 1 });
    e.reader.open_gate();
    e.cache().wait({ 0, 0 }, tier_id::high, ALL);
    e.cache().wait({ 0, 1 }, tier_id::high, ALL);
    e.look_ahead();
    e.finish(0, { 0, 1 });
    while (e.cache().error().ok()) {
        std::this_thread::yield();
    }
    e.choose(1, { 5, 6 });
    CHECK(e.cache().wait({ 1, 6 }, tier_id::high, ALL).message() == "the disk is gone");
    e.finish(1, { 5, 6 });
    REQUIRE(e.cache().acquire({ 2, 0 }, tier_id::high));
    REQUIRE(e.cache().acquire({ 2, 1 }, tier_id::high));
}

TEST_CASE("whatever is predicted, each layer is given the experts that it chose") {
    std::mt19937 random(5);
    size_t       wrong = 0;
    for (const uint32_t n_slots : { 2u, 3u, 7u, 20u }) {
        std::vector<belief> beliefs;
        for (layer_id layer = 0; layer < N_LAYERS; layer++) {
            for (size_t topic = 0; topic < 8; topic++) {
                beliefs.push_back({ layer, topic, { { random() % 8, 0.6f }, { random() % 8, 0.3f } } });
            }
        }
        engine e(beliefs, n_slots);
        e.reader.open_gate();
        for (uint32_t i = 0; i < 60 * N_LAYERS; i++) {
            const layer_id layer(i % N_LAYERS);
            const int32_t  first  = int32_t(random() % 8);
            const auto     chosen = { first, (first + 1 + int32_t(random() % 7)) % 8 };
            e.choose(layer, chosen);
            e.look_ahead({ random() % 8 });
            for (const int32_t expert : chosen) {
                const expert_id id  = { layer, uint32_t(expert) };
                wrong              += !e.cache().wait(id, tier_id::high, ALL).ok();
                wrong              += *e.cache().data(id, tier_id::high, part_id::down) !=
                         fake_reader::byte_at(e.index.locate(tier_id::high, layer, part_id::down, id.expert).offset);
            }
            e.finish(layer, chosen);
        }
        CHECK(e.counters.predicted_right <= e.counters.predicted);
        CHECK(e.counters.prefetched_used <= e.counters.prefetched);
        CHECK((e.counters.prefetched > 0) == (n_slots > 2)); // two are the demand's
    }
    CHECK(wrong == 0);
}

TEST_CASE("the second pass asks for what the first one chose in all layers, and is no part of a trial") {
    engine e({}, 8, 0, {}, 1, N_LAYERS, "repeat");
    e.reader.open_gate();
    e.batch.set_pass(batch_pass::draft);
    for (const layer_id layer : { 0, 1, 2, 3 }) {
        e.run_layer(layer, { 2 * int32_t(layer), 2 * int32_t(layer) + 1 });
    }
    for (const uint32_t other : { 2, 3, 4, 5, 6, 7 }) {
        e.load({ 0, other });
    }
    e.load({ 1, 0 });
    e.load({ 1, 1 });
    CHECK_FALSE(e.cache().holds({ 3, 7 }, tier_id::high, {}));
    e.batch.set_pass(batch_pass::second);
    e.run_layer(0, { 0, 1 });
    for (const layer_id layer : { 1, 2, 3 }) {
        CHECK(e.cache().holds({ layer, 2 * uint32_t(layer) }, tier_id::high, ALL));
        CHECK(e.cache().holds({ layer, 2 * uint32_t(layer) + 1 }, tier_id::high, ALL));
    }
    e.run_layer(1, { 2, 7 });
    e.run_layer(2, { 4, 5 });
    e.run_layer(3, { 6, 7 });
    CHECK(e.counters.predicted == 6);
    CHECK(e.counters.predicted_right == 5);
    CHECK(e.counters.prefetched == 6);
    CHECK(e.counters.prefetched_used == 5);

    e.batch.set_pass(batch_pass::draft); // predicted from the last draft, not from the second pass
    e.run_layer(0, { 0, 1 });
    e.run_layer(1, { 2, 3 });
    CHECK(e.counters.predicted_right == 5 + 2);
}

TEST_CASE("the second pass asks as far as there is room, and later for the rest") {
    engine e({}, 4, 0, {}, 1, N_LAYERS, "repeat");
    e.reader.open_gate();
    e.batch.set_pass(batch_pass::draft);
    for (const layer_id layer : { 0, 1, 2, 3 }) {
        e.run_layer(layer, { 2 * int32_t(layer), 2 * int32_t(layer) + 1 });
    }
    e.load({ 0, 4 });
    e.load({ 0, 5 });
    e.load({ 0, 0 });
    e.load({ 0, 1 });
    e.batch.set_pass(batch_pass::second);
    e.run_layer(0, { 0, 1 });
    CHECK(e.cache().holds({ 1, 2 }, tier_id::high, ALL));
    CHECK(e.cache().holds({ 1, 3 }, tier_id::high, ALL));
    CHECK_FALSE(e.cache().holds({ 3, 6 }, tier_id::high, {}));
    e.wait({ 1, 2 });
    e.wait({ 1, 3 });
    e.run_layer(1, { 2, 3 });
    CHECK(e.cache().holds({ 2, 4 }, tier_id::high, ALL));
    CHECK(e.cache().holds({ 2, 5 }, tier_id::high, ALL));
    e.wait({ 2, 4 });
    e.wait({ 2, 5 });
    e.run_layer(2, { 4, 5 });
    CHECK(e.cache().holds({ 3, 6 }, tier_id::high, ALL));
}
