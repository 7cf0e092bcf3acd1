// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-backend.h"
#include "ggml-rpc.h"

#include <arpa/inet.h>
#include <chrono>
#include <doctest/doctest.h>
#include <string>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>

inline sockaddr_in loopback(uint16_t port) {
    sockaddr_in address     = {};
    address.sin_family      = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port        = htons(port);
    return address;
}

inline uint16_t free_port() {
    sockaddr_in address = loopback(0);
    socklen_t   size    = sizeof(address);
    const int   fd      = socket(AF_INET, SOCK_STREAM, 0);
    REQUIRE(bind(fd, (sockaddr *) &address, size) == 0);
    REQUIRE(getsockname(fd, (sockaddr *) &address, &size) == 0);
    close(fd);
    return ntohs(address.sin_port);
}

inline bool accepts(uint16_t port) {
    const sockaddr_in address = loopback(port);
    const int         fd      = socket(AF_INET, SOCK_STREAM, 0);
    const bool        ok      = connect(fd, (const sockaddr *) &address, sizeof(address)) == 0;
    close(fd);
    return ok;
}

// The server ends with the process.
inline ggml_backend_dev_t start_rpc_device() {
    const uint16_t    port     = free_port();
    const std::string endpoint = "127.0.0.1:" + std::to_string(port);
    std::thread([endpoint] {
        ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
        ggml_backend_rpc_start_server(endpoint.c_str(), nullptr, 2, 1, &cpu);
    }).detach();
    while (!accepts(port)) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    ggml_backend_reg_t reg = ggml_backend_rpc_add_server(endpoint.c_str());
    REQUIRE(reg);
    ggml_backend_register(reg);
    return ggml_backend_reg_dev_get(reg, 0);
}

// A device whose memory cannot be touched and whose arithmetic is the CPU's: the CPU behind ggml's RPC server.
inline ggml_backend_dev_t rpc_device() {
    static ggml_backend_dev_t started = start_rpc_device();
    return started;
}
