// SPDX-License-Identifier: MIT
#include "record/trace.h"

#include "fixtures/cache-fixture.h"

#include <algorithm>
#include <doctest/doctest.h>
#include <filesystem>
#include <numeric>
#include <string>
#include <vector>

static const std::string COLUMNS = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n";

using tokens = std::vector<batch_info::row>;

// Two layers of 4 experts of 12288 bytes in high precision and 3456 in low, of which a token uses 2.
static const opened_model & model() {
    static const opened_model two_layers;
    return two_layers;
}

// All in high precision; nothing but `was` is resident.
static status add(trace_writer & writer, const layer_routing & routing, const tokens & rows,
                  const std::vector<per_tier<bool>> & was) {
    const layer_plan plan = { {}, {}, std::vector<precision>(routing.experts.size(), precision::high) };
    return writer.add({ routing, plan, rows, was, {}, nullptr });
}

// One expert per token, 0, 1, ..., with weight 0.5; nothing is resident.
static status add(trace_writer & writer, layer_id layer, const tokens & rows) {
    const int64_t            n = int64_t(rows.size());
    std::vector<int32_t>     experts(rows.size());
    const std::vector<float> weights(rows.size(), 0.5f);
    std::iota(experts.begin(), experts.end(), 0);
    return add(writer, { layer, n, 1, experts, weights }, rows, std::vector<per_tier<bool>>(rows.size()));
}

// The first five columns of the rows: turn, phase, step, layer, slot, then the expert.
static std::string rows_of(const std::string & file) {
    std::string text = temp_dir::read(file);
    text.erase(0, text.find(COLUMNS) + COLUMNS.size());
    const std::string rest = ",0.5,0,12288\n";
    for (size_t at = text.find(rest); at != std::string::npos; at = text.find(rest)) {
        text.replace(at, rest.size(), " ");
    }
    return text;
}

static void check_ok(const status & s) {
    CHECK_MESSAGE(s.ok(), s.message());
}

TEST_CASE("a trace, byte by byte") {
    temp_dir     dir;
    trace_writer writer;
    check_ok(writer.open(dir.path("t.csv"), model().index));
    CHECK(writer.is_open());
    writer.begin_batch({ { 0, 0 } });

    const std::vector<per_tier<bool>> was = { { { true, true } }, { { false, true } } };
    for (const std::vector<float> & weights : { std::vector<float>{ 0.75f, 0.1f }, std::vector<float>() }) {
        check_ok(add(writer, { 1, 1, 2, { 2, 3 }, weights }, { { 0, 0 } }, was));
    }
    check_ok(writer.close());
    CHECK_FALSE(writer.is_open());
    CHECK(temp_dir::read(dir.path("t.csv")) == "# route_trace v1\n"
                                               "# model=" +
                                                   model().index.files()[0] +
                                                   " arch=test n_layer=2 n_expert=4 n_expert_used=2\n"
                                                   "# layer=0 expert_bytes=12288 dense_bytes=0\n"
                                                   "# layer=1 expert_bytes=12288 dense_bytes=0\n" +
                                                   COLUMNS +
                                                   "0,1,0,1,0,2,0.75,2,0\n"
                                                   "0,1,0,1,1,3,0.100000001,1,12288\n"
                                                   "0,1,0,1,0,2,nan,2,0\n"
                                                   "0,1,0,1,1,3,nan,1,12288\n");
}

TEST_CASE("an expert is read once for a layer and precision, and not for what is skipped") {
    temp_dir     dir;
    trace_writer writer;
    check_ok(writer.open(dir.path("t.csv"), model().index));
    const tokens three = { { 0, 0 }, { 1, 0 }, { 2, 0 } };
    writer.begin_batch(three);
    const layer_routing routing = { 0, 3, 1, { 1, 1, 2 }, {} };
    const layer_plan    plan    = { {}, {}, { precision::low, precision::low, precision::skip } };
    check_ok(writer.add({ routing, plan, three, std::vector<per_tier<bool>>(3), {}, nullptr }));
    check_ok(writer.close());
    const std::string text = temp_dir::read(dir.path("t.csv"));
    CHECK(text.substr(text.find(COLUMNS) + COLUMNS.size()) == "0,1,0,0,0,1,nan,0,3456\n"
                                                              "1,1,0,0,0,1,nan,0,0\n"
                                                              "2,1,0,0,0,2,nan,0,0\n");
}

TEST_CASE("a layer that uses fewer experts than another one says so") {
    temp_dir       dir;
    trace_writer   writer;
    opened_model   one_of_second;
    const uint32_t n_used[] = { 2, 1 };
    one_of_second.index.set_experts_used(n_used, 2);
    check_ok(writer.open(dir.path("t.csv"), one_of_second.index));
    check_ok(writer.close());
    const std::string text = temp_dir::read(dir.path("t.csv"));
    CHECK(text.find("n_expert=4 n_expert_used=2\n# layer=0 expert_bytes=12288 dense_bytes=0\n"
                    "# layer=1 expert_bytes=12288 dense_bytes=0 n_expert_used=1\n") != std::string::npos);
}

TEST_CASE("a prompt is phase 0, a single token phase 1, and steps go on through both") {
    temp_dir     dir;
    trace_writer writer;
    check_ok(writer.open(dir.path("t.csv"), model().index));
    const tokens prompt = { { 0, 0 }, { 0, 1 }, { 0, 2 } };
    writer.begin_batch(prompt);
    check_ok(add(writer, 0, prompt));
    check_ok(add(writer, 1, { { 0, 2 } })); // the last layer computes what is asked for
    writer.begin_batch({ { 0, 3 } });
    check_ok(add(writer, 0, { { 0, 3 } }));
    check_ok(add(writer, 1, { { 0, 3 } }));
    check_ok(writer.close());
    CHECK(rows_of(dir.path("t.csv")) == "0,0,0,0,0,0 0,0,1,0,0,1 0,0,2,0,0,2 0,0,2,1,0,0 0,1,3,0,0,0 0,1,3,1,0,0 ");
}

TEST_CASE("a sequence that begins anew is another turn; positions that go back are not") {
    temp_dir     dir;
    trace_writer writer;
    check_ok(writer.open(dir.path("t.csv"), model().index));
    for (const int32_t position : { 0, 1, 1, 0, 1 }) {
        writer.begin_batch({ { 4, position } });
        check_ok(add(writer, 0, { { 4, position } }));
    }
    writer.begin_sequence(4);
    writer.begin_sequence(17); // unknown: nothing to forget
    writer.begin_batch({ { 4, 2 } });
    check_ok(add(writer, 0, { { 4, 2 } }));
    check_ok(writer.close());
    CHECK(rows_of(dir.path("t.csv")) == "0,1,0,0,0,0 0,1,1,0,0,0 0,1,2,0,0,0 1,1,0,0,0,0 1,1,1,0,0,0 2,1,0,0,0,0 ");
}

TEST_CASE("sequences side by side keep their turns and steps") {
    temp_dir     dir;
    trace_writer writer;
    check_ok(writer.open(dir.path("t.csv"), model().index));
    const tokens mixed = { { 1, 0 }, { 3, 0 }, { 3, 1 } }; // one decodes, one has a prompt
    writer.begin_batch(mixed);
    check_ok(add(writer, 0, mixed));
    const tokens both = { { 3, 2 }, { 1, 1 } };
    writer.begin_batch(both);
    check_ok(add(writer, 0, both));
    check_ok(writer.close());
    CHECK(rows_of(dir.path("t.csv")) == "0,1,0,0,0,0 1,0,0,0,0,1 1,0,1,0,0,2 1,1,2,0,0,0 0,1,1,0,0,1 ");
}

TEST_CASE("tokens at one position are told apart by their order") {
    temp_dir     dir;
    trace_writer writer;
    check_ok(writer.open(dir.path("t.csv"), model().index));
    const tokens image = { { 0, 0 }, { 0, 0 }, { 0, 0 } };
    writer.begin_batch(image);
    check_ok(add(writer, 0, image));
    check_ok(writer.close());
    CHECK(rows_of(dir.path("t.csv")) == "0,0,0,0,0,0 0,0,1,0,0,1 0,0,2,0,0,2 ");
}

TEST_CASE("a second trace with the same object starts from nothing, over an older file") {
    temp_dir     dir;
    trace_writer writer;
    const auto   file = dir.write("t.csv", "# route_trace v1\n" + std::string(100000, 'x'));
    for (int i = 0; i < 2; i++) {
        check_ok(writer.open(file, model().index));
        writer.begin_batch({ { 0, 5 } });
        check_ok(add(writer, 0, { { 0, 5 } }));
        check_ok(writer.close());
        check_ok(writer.close()); // does nothing
        CHECK(rows_of(file) == "0,1,0,0,0,0 ");
    }
}

TEST_CASE("line breaks in a name do not break the header") {
    temp_dir     dir;
    trace_writer writer;
    gguf_builder file;
    expert_index index;
    moe_model().add_high(file);
    check_ok(index.open(file.write(dir.path("a\nb.gguf")), ""));
    check_ok(writer.open(dir.path("t.csv"), index));
    check_ok(writer.close());
    CHECK(temp_dir::read(dir.path("t.csv")).find("a?b.gguf arch=test ") != std::string::npos);
}

TEST_CASE("a long trace is complete, also when the writer is just destroyed") {
    temp_dir     dir;
    const int    n_tokens = 100000;
    const tokens one      = { { 0, 1 } };
    {
        trace_writer writer;
        check_ok(writer.open(dir.path("t.csv"), model().index));
        for (int i = 0; i < n_tokens; i++) {
            writer.begin_batch(one);
            REQUIRE(add(writer, 0, one).ok());
        }
        CHECK(std::filesystem::file_size(dir.path("t.csv")) > 1000000); // not all kept until the end
    }
    const std::string text = temp_dir::read(dir.path("t.csv"));
    CHECK(std::count(text.begin(), text.end(), '\n') == n_tokens + 5);
    CHECK(text.substr(text.size() - 29) == "\n0,1,99999,0,0,0,0.5,0,12288\n");
}

TEST_CASE("a file that is no trace is left alone") {
    temp_dir     dir;
    trace_writer writer;
    for (const std::string content : { "GGUF", "# route_trace v10\n" }) {
        const std::string file = dir.write("m.gguf", content);
        const status      s    = writer.open(file, model().index);
        CHECK(s.message() ==
              "'" + file + "' exists and is not a trace: choose another file for the trace, or remove it");
        CHECK_FALSE(writer.is_open());
        CHECK(temp_dir::read(file) == content);
    }
    check_ok(writer.open(dir.write("empty.csv", ""), model().index));
    check_ok(writer.close());
}

TEST_CASE("a file that cannot be made is an error at once") {
    temp_dir     dir;
    trace_writer writer;
    const status s = writer.open(dir.path("none/t.csv"), model().index);
    CHECK(s.message() == "the trace '" + dir.path("none/t.csv") +
                             "' cannot be written: No such file or directory; choose another file");
    CHECK_FALSE(writer.is_open());
    check_ok(writer.close());
}

TEST_CASE("a full disk is an error, at the latest when the trace is closed, and repeated until then") {
    const std::string full = "/dev/full";
    trace_writer      writer;
    check_ok(writer.open(full, model().index));
    const tokens one = { { 0, 1 } };
    status       s;
    for (int i = 0; i < 100000 && s.ok(); i++) {
        writer.begin_batch(one);
        s = add(writer, 0, one);
    }
    CHECK(s.message() == "the trace '/dev/full' cannot be written: No space left on device; free some space or choose "
                         "another file");
    CHECK(add(writer, 0, one).message() == s.message());
    CHECK(writer.close().message() == s.message());
    CHECK(std::filesystem::exists(full)); // no regular file: not removed

    check_ok(writer.open(full, model().index)); // a short trace
    CHECK(writer.close().message() == s.message());
}

TEST_CASE("a token that was not announced is an error, and the file is removed") {
    temp_dir     dir;
    trace_writer writer;
    check_ok(writer.open(dir.path("t.csv"), model().index));
    writer.begin_batch({ { 0, 1 }, { 0, 2 } });
    CHECK_FALSE(add(writer, 0, { { 0, 3 } }).ok());
    const std::string message = writer.close().message();
    CHECK(message.find("token 0 of layer 0 (sequence 0, position 3) is not in the batch") != std::string::npos);
    CHECK_FALSE(std::filesystem::exists(dir.path("t.csv")));

    check_ok(writer.open(dir.path("t.csv"), model().index));
    writer.begin_batch({ { 0, 1 }, { 0, 2 } });
    CHECK_FALSE(add(writer, 0, { { 0, 2 }, { 0, 1 } }).ok()); // not in the order of the batch
}
