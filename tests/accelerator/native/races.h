// Happens-before: every access of a stream to a range of bytes is checked against the accesses before it.
//
// Lateness (streams.h) makes a missing wait give wrong numbers only where the late side is a copy. Kernels run at once, so
// a copy that fails to wait *for compute* reads right numbers here and wrong ones on a GPU: only the clocks find it.
// A stream's clock says how much of each other stream it is behind. Waiting for an event joins the event's clock; the
// host has one clock for all of its threads (whoever hands work from thread to thread orders it by other means), joined
// whenever it waits, and everything that is enqueued later is behind it.
//
// A tensor's access is the hull of its elements: two interleaved strided views count as overlapping.
#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "memory.h"

namespace late {

using Clock = std::vector<uint64_t>;  // by number of stream

inline void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size(), 0);
  for (size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}

struct Touch {
  const void* begin;
  size_t nbytes;
  bool writes;
};

class Races {
 public:
  static Races& all() {
    static auto* one = new Races;
    return *one;
  }

  bool is_checking = false;
  Clock host;

  void begin(bool checks) {
    Guarded lock(everything());
    is_checking = checks;
    ranges_.clear();
    found_.clear();
  }

  const std::vector<std::string>& found() const { return found_; }
  void tell_last(const std::string& where) { if (!found_.empty() && found_.back().find('\n') == std::string::npos) found_.back() += where; }

  // Accesses of stream `number` as one operation, behind all that `clock` knows. Returns how many races it adds.
  size_t note(size_t number, Clock& clock, const std::vector<Touch>& touches, const std::string& what) {
    join(clock, host);
    if (clock.size() <= number) clock.resize(number + 1, 0);
    uint64_t tick = ++clock[number];
    if (!is_checking) return 0;
    size_t before = found_.size();
    Access access{number, tick, name(what)};
    for (auto& touch : touches) note_one(access, clock, touch);
    return found_.size() - before;
  }

  // The host gives memory up, or touches it itself, without the help of a stream.
  void note_host(const void* begin, size_t nbytes, const std::string& what) {
    if (!is_checking) return;
    Access access{kNobody, 0, name(what)};
    auto e = uintptr_t(begin) + nbytes;
    split(uintptr_t(begin));
    split(e);
    for (auto it = ranges_.lower_bound(uintptr_t(begin)); it != ranges_.end() && it->first < e;) {
      check(access, host, it->second.write, "given up while written");
      for (auto& read : it->second.reads) check(access, host, read, "given up while read");
      it = ranges_.erase(it);
    }
  }

 private:
  static constexpr size_t kNobody = ~size_t(0);
  static constexpr size_t kMost = 2000;  // races that are kept in words

  struct Access {
    size_t stream = kNobody;
    uint64_t tick = 0;
    int what = -1;
  };
  struct Range {
    uintptr_t end;
    Access write;
    std::vector<Access> reads;  // one a stream
  };

  int name(const std::string& what) {
    auto [at, is_new] = numbers_.emplace(what, int(names_.size()));
    if (is_new) names_.push_back(what);
    return at->second;
  }

  void split(uintptr_t at) {
    auto it = ranges_.upper_bound(at);
    if (it == ranges_.begin()) return;
    --it;
    if (it->first >= at || at >= it->second.end) return;
    Range right = it->second;
    it->second.end = at;
    ranges_.emplace(at, std::move(right));
  }

  void check(const Access& now, const Clock& clock, const Access& before, const char* kind) {
    if (before.stream == kNobody || before.stream == now.stream) return;
    if (before.stream < clock.size() && clock[before.stream] >= before.tick) return;
    if (found_.size() < kMost)
      found_.push_back(c10::str(kind, ": ", names_[now.what], " (", now.stream == kNobody ? "host" : c10::str("stream ", now.stream),
                                ") is not ordered behind ", names_[before.what], " (stream ", before.stream, ")"));
  }

  void note_one(const Access& access, const Clock& clock, const Touch& touch) {
    if (!touch.begin || !touch.nbytes) return;
    auto begin = uintptr_t(touch.begin), end = begin + touch.nbytes;
    split(begin);
    split(end);
    uintptr_t at = begin;  // bytes below it are done
    auto fresh = [&](uintptr_t until) {
      Range range{until, {}, {}};
      if (touch.writes) range.write = access; else range.reads = {access};
      ranges_.emplace(at, std::move(range));
    };
    auto it = ranges_.lower_bound(begin);
    while (it != ranges_.end() && it->first < end) {
      if (it->first > at) fresh(it->first);
      Range& range = it->second;
      at = range.end;
      check(access, clock, range.write, touch.writes ? "write after write" : "read after write");
      if (touch.writes) {
        for (auto& read : range.reads) check(access, clock, read, "write after read");
        range.reads.clear();
        range.write = access;
      } else {
        bool is_known = false;
        for (auto& read : range.reads)
          if (read.stream == access.stream) read = access, is_known = true;
        if (!is_known) range.reads.push_back(access);
      }
      ++it;
    }
    if (at < end) fresh(end);
  }

  std::map<uintptr_t, Range> ranges_;
  std::vector<std::string> found_;
  std::vector<std::string> names_;
  std::unordered_map<std::string, int> numbers_;
};

}  // namespace late
