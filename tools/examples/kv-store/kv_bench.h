// The benchmark of kv-store and its checks.
#pragma once

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "histogram.h"
#include "kv_table.h"
#include "program.h"
#include "spinwire/spinwire.h"

namespace kv {

using namespace spinwire;  // NOLINT: a part of one program
using tools::Histogram;

/// The result of a get.
struct Found {
  Status status = Status::ok;  // not ok: the READ failed, or the slot stayed torn
  Look look = Look::absent;
  std::string_view value;     // points into the read buffer, valid until the callback returns
  std::uint64_t version = 0;  // of the slot: each put raises it
};

struct BenchOptions {
  std::uint64_t count = 200'000;   // operations
  std::uint32_t keys = 8;          // few, so that puts and gets meet
  std::uint32_t put_percent = 20;  // of the operations
  std::uint32_t value_bytes = 400;
};

/// Puts and gets at random, several at once, and checks every value. Other writers may put to the
/// same keys, before or meanwhile: slot versions show that no value is older than one seen before.
/// Nobody may delete the keys meanwhile.
template <typename Client>
class Bench {
 public:
  Bench(Client& client, const BenchOptions& options)
      : client_(client), options_(options), keys_(options.keys) {
    for (std::uint32_t k = 0; k < options.keys; ++k) keys_[k].name = fmt::format("bench {}", k);
  }

  /// Returns a description of the first fault; empty if there is none.
  [[nodiscard]] std::string run() {
    const std::uint64_t begin = client_.clock().now();
    Idler idler(IdleStrategy::yield);
    while (done_ != options_.count) {
      while (begun_ != options_.count && begin_one()) ++begun_;
      (void)idler.idle(client_.engine(), client_.poll());
      if (!wrong_.empty()) return wrong_;
      if (program::stop_requested()) return "interrupted";
    }
    report(client_.clock().duration(client_.clock().now() - begin));
    return {};
  }

 private:
  struct Key {
    std::string name;
    std::uint64_t put = 0;    // our values that were put, or are being put
    std::uint64_t known = 0;  // the latest version seen: in a reply of the server or by a get
    bool busy = false;        // at most one put of a key at a time
  };

  bool begin_one() {
    if (!next_) {  // kept until the library accepts it
      next_ = {static_cast<std::uint32_t>(random_() % options_.keys),
               random_() % 100 < options_.put_percent};
    }
    const auto [key, is_put] = *next_;
    const Status status = is_put ? begin_put(key) : begin_get(key);
    if (status == Status::ok) next_.reset();
    if (status != Status::ok && status != Status::would_block)
      wrong_ = fmt::format("{}: {}", keys_[key].name, to_string(status));
    return status == Status::ok;
  }

  Status begin_put(std::uint32_t key) {
    Key& k = keys_[key];
    if (k.busy) return Status::would_block;
    const std::string value = value_of(key, {us_, k.put + 1}, options_.value_bytes);
    const auto done = [this, key, at = client_.clock().now()](Reply& r) {
      Key& of = keys_[key];
      of.busy = false;
      std::uint64_t version = 0;
      if (r.status() == Status::ok && r.bytes().size() == sizeof version) {
        std::memcpy(&version, r.bytes().data(), sizeof version);
        of.known = std::max(of.known, version);
      } else {
        wrong_ = fmt::format("{} was not put: {} {}", of.name, to_string(r.status()), r.text());
      }
      puts_.record(client_.clock().now() - at);
      ++done_;
    };
    const Status status = client_.put(k.name, value, done);
    if (status != Status::ok) return status;
    ++k.put;
    k.busy = true;
    return status;
  }

  Status begin_get(std::uint32_t key) {
    // The get must find at least the version known now.
    const auto done = [this, key, at = client_.clock().now(),
                       least = keys_[key].known](const Found& f) {
      check(key, least, f);
      gets_.record(client_.clock().now() - at);
      ++done_;
    };
    return client_.get(keys_[key].name, done);
  }

  /// The head of each value.
  struct Head {
    std::uint64_t writer;
    std::uint64_t number;  // counts this writer's values of the key
  };
  /// The bytes after the head follow from it.
  [[nodiscard]] static std::string value_of(std::uint32_t key, const Head& head, std::size_t size) {
    std::string value(size, static_cast<char>('a' + (head.writer + head.number * 7 + key) % 26));
    std::memcpy(value.data(), &head, sizeof head);
    return value;
  }
  /// Whether a bench put this value: any value of another writer, but only a value that we put
  /// ourselves.
  [[nodiscard]] bool was_put(std::uint32_t key, std::string_view value) const {
    Head head{};
    if (value.size() < sizeof head) return false;
    std::memcpy(&head, value.data(), sizeof head);
    if (value != value_of(key, head, value.size())) return false;
    if (head.writer != us_) return true;
    return head.number != 0 && head.number <= keys_[key].put &&
           value.size() == options_.value_bytes;
  }

  void check(std::uint32_t key, std::uint64_t least, const Found& f) {
    Key& k = keys_[key];
    if (f.status != Status::ok) {
      wrong_ = fmt::format("{} cannot be read: {}", k.name, to_string(f.status));
    } else if (f.look == Look::there && !was_put(key, f.value)) {
      wrong_ = fmt::format("{} has a value that was never put", k.name);
    } else if (f.version < least) {  // 0 if it is absent
      wrong_ = fmt::format("{} has version {} after {} was seen", k.name, f.version, least);
    }
    k.known = std::max(k.known, f.version);
  }

  void report(Nanoseconds took) const {
    const double seconds = std::chrono::duration<double>(took).count();
    fmt::print(
        "{} operations in {:.3f} s ({:.3f} million/s), every value whole and none older than "
        "one seen before\n",
        done_, seconds, static_cast<double>(done_) / seconds / 1e6);
    print("put (call)", puts_);
    print("get (READ)", gets_);
    fmt::print("  {} READs met a slot being written, and were repeated\n", client_.read_again());
  }
  void print(const char* what, const Histogram& h) const {
    const auto us = [this](std::uint64_t ticks) {
      return static_cast<double>(ticks) / client_.clock().ticks_per_ns() / 1000;
    };
    fmt::print(
        "  {}  {:>8}  min {:.2f} us  p50 {:.2f} us  p90 {:.2f} us  p99 {:.2f} us  max {:.2f} us\n",
        what, h.count(), us(h.min()), us(h.percentile(50)), us(h.percentile(90)),
        us(h.percentile(99)), us(h.max()));
  }

  Client& client_;
  BenchOptions options_;
  std::vector<Key> keys_;
  const std::uint64_t us_ = std::random_device()() | std::uint64_t{1} << 32;  // our writer number
  std::mt19937_64 random_{5};
  std::optional<std::pair<std::uint32_t, bool>> next_;
  std::uint64_t begun_ = 0;
  std::uint64_t done_ = 0;
  std::string wrong_;
  Histogram puts_;
  Histogram gets_;
};

}  // namespace kv
