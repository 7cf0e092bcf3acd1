// SPDX-License-Identifier: MIT
#pragma once

// The memory of requests while llama-server reads them. With an expert cache all of them together keep to
// hobbit.requests; they wait for each other, and what could never fit is refused. Any thread may call these functions.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

struct common_params;
struct mtmd_context;
struct server_http_req;
struct server_http_res;

using server_requests_handler = std::function<std::unique_ptr<server_http_res>(const server_http_req &)>;

// Adds the override hobbit.requests where it is not given. REQUIRES: before the model is loaded
void server_requests_plan(common_params & params);

// Bounds requests from now on, or not.
void server_requests_bound(bool is_bounded);

// Bytes that the body of a request may have.
uint64_t server_requests_body_limit();

// Waits for the memory of a body of `size` bytes, which the result holds; null with the reason where that takes long.
// should_stop: the client has left
std::shared_ptr<void> server_requests_hold_body(uint64_t size, const std::function<bool()> & should_stop,
                                                std::string & reason);

// Wraps a handler: it runs once there is memory for what it reads, waits for the memory of each text that it tokenizes,
// and its response's `finish` runs when all of that is free.
server_requests_handler server_requests_bounded(server_requests_handler handler);

// Throws std::invalid_argument for more prompts in one request than there is memory for.
void server_requests_check_prompts(uint64_t n);

// Waits for the memory of images' pixels and audio's samples, by what the files announce, before they are decoded.
// REQUIRES: called where a handler reads a request. Throws if they could never fit.
void server_requests_hold_media(const mtmd_context * ctx, const std::vector<std::vector<unsigned char>> & files);
