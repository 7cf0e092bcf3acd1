// SPDX-License-Identifier: MIT
//
// Parts that are copied from host memory to a device's.
#include "fixtures/loader-fixture.h"
#include "fixtures/rpc-device.h"
#include "ggml-cpp.h"

#include <doctest/doctest.h>

static constexpr part_set UP = part_id::up;

// One part of some blocks: read into `host`, copied from there to `buffer`.
struct two_levels {
    const size_t            n_blocks;
    fake_reader             reader;
    stats                   counters;
    blocks                  host;
    ggml_backend_buffer_ptr buffer;
    load_state              read;
    load_state              copied;
    loader                  l{ reader, counters, 2, { rpc_device() } };

    explicit two_levels(size_t n = 1) :
        n_blocks(n),
        host(n),
        buffer(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(rpc_device()), n * BLOCK)) {
        ggml_backend_buffer_clear(buffer.get(), 0);
    }

    ~two_levels() { reader.open_gate(); }

    char * data() { return static_cast<char *>(ggml_backend_buffer_get_base(buffer.get())); }

    void ask_host(load_urgency urgency = load_urgency::demand) {
        l.submit(read, part_id::up, block_at(7, n_blocks), { host[0] }, urgency);
    }

    void ask_device(load_urgency urgency = load_urgency::demand) {
        const matrix_shape shape = { int64_t(BLOCK / sizeof(float)), int64_t(n_blocks) };
        l.transfer(copied, part_id::up, read, host[0], block_at(7, n_blocks), { data(), buffer.get(), shape }, urgency);
    }

    bool is_there() {
        const ggml_context_ptr ctx(ggml_init({ ggml_tensor_overhead(), nullptr, /* .no_alloc = */ true }));
        ggml_tensor *          tensor = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I8, int64_t(n_blocks * BLOCK));
        std::vector<char>      bytes(n_blocks * BLOCK);
        tensor->data   = data();
        tensor->buffer = buffer.get();
        ggml_backend_tensor_get(tensor, bytes.data(), 0, bytes.size());
        for (size_t i = 0; i < n_blocks; i++) {
            if (bytes[i * BLOCK] != fake_reader::byte_at((7 + i) * BLOCK)) {
                return false;
            }
        }
        return true;
    }
};

TEST_CASE("what is in host memory is copied without being read again") {
    for (const size_t n_blocks : { size_t(1), 2 * loader::chunk_size / BLOCK + 3 }) {
        two_levels t(n_blocks);
        t.reader.open_gate();
        t.ask_host();
        REQUIRE(t.l.wait(t.read, UP).ok());
        const uint64_t read = t.counters.bytes_read;
        t.ask_device();
        CHECK(t.l.wait(t.copied, UP).ok());
        CHECK(t.is_there());
        CHECK(t.counters.bytes_read == read);
        CHECK(read == n_blocks * BLOCK);
    }
}

TEST_CASE("what is on its way into host memory is copied when it has arrived") {
    two_levels t(loader::chunk_size / BLOCK + 1);
    t.ask_host();
    t.ask_device();
    t.ask_device(); // asking again changes nothing
    t.reader.let(1);
    t.reader.wait_begun(2);
    CHECK(t.l.requested(t.copied) == UP);
    CHECK_FALSE(t.l.settled(t.copied));
    CHECK_FALSE(t.l.arrived(t.copied, UP));
    t.reader.let(1);
    CHECK(t.l.wait(t.copied, UP).ok());
    CHECK(t.is_there());
    CHECK(t.reader.begun().size() == 2);
}

TEST_CASE("an error of reading reaches who waits for the copy") {
    two_levels t;
    t.reader.fail_at(7 * BLOCK, "the disk is gone");
    t.ask_host();
    t.ask_device();
    t.reader.open_gate();
    CHECK(t.l.wait(t.copied, UP).message() == "the disk is gone");
    while (!t.l.settle(t.copied)) {
    }
    CHECK(t.l.requested(t.copied) == part_set());
    t.ask_device(); // nothing is asked for any more
    CHECK(t.l.requested(t.copied) == part_set());
}

TEST_CASE("a copy whose source is cancelled counts as not asked for") {
    two_levels t;
    load_state other;
    blocks     memory(1);
    t.l.submit(other, part_id::up, block_at(0), { memory[0] }, load_urgency::prefetch);
    t.reader.wait_begun(1); // no other prefetch begins beside it
    t.ask_host(load_urgency::prefetch);
    t.ask_device(load_urgency::prefetch);
    t.l.cancel(t.read);
    CHECK(t.l.requested(t.read) == part_set());
    CHECK(t.l.requested(t.copied) == part_set());
    CHECK(t.l.settled(t.copied));
    t.ask_host();
    t.ask_device();
    t.reader.open_gate();
    CHECK(t.l.wait(t.copied, UP).ok());
    CHECK(t.is_there());
}

TEST_CASE("a copy asked for ahead is dropped while its source is read, or becomes a demand") {
    for (const bool is_demanded : { false, true }) {
        CAPTURE(is_demanded);
        two_levels t;
        t.ask_host(load_urgency::prefetch);
        t.reader.wait_begun(1);
        t.ask_device(load_urgency::prefetch);
        if (is_demanded) {
            t.ask_host();
            t.ask_device();
        }
        t.l.cancel(t.copied);
        CHECK(t.l.requested(t.copied) == (is_demanded ? UP : part_set()));
        if (!is_demanded) {
            t.l.abandon(t.copied); // nothing is on its way: this does not wait for the read
        }
        t.reader.open_gate();
        CHECK(t.l.wait(t.read, UP).ok());
        CHECK((!is_demanded || t.l.wait(t.copied, UP).ok()));
        CHECK(t.is_there() == is_demanded);
    }
}
