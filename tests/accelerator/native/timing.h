// Seconds of the late device, for whoever asks for them: the links between host and device have rates, each direction its own.
//
// A copy between host and device takes its bytes by the rate of its direction, behind its stream and behind the copies that
// went that way before. There are two clocks. `slept`: the machine's; whoever is behind a copy sleeps until it is through, and
// compute takes what it takes. `counted`: nobody sleeps. A stream has an instant at which all that it was given is through: a
// kernel moves it on by the seconds that its thread was on a processor. A thread of the host has a clock of its own, which goes
// on while the thread is on a processor outside of kernels, and jumps where it waits for a stream. So neither other processes
// nor other threads change what is counted; disks are not.
#pragma once

#include <time.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "memory.h"

namespace late {

enum class Pace { none, slept, counted };

struct HostClock {
  double now_s = 0, seen_s = -1;  // on the counted clock; of the processor, when it was looked at last
  int standing = 0;               // inside of what the emulation takes, and not the host
};
inline thread_local HostClock t_clock;

inline double processor_s() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

class Timing {
 public:
  static Timing& all() {
    static auto* one = new Timing;
    return *one;
  }

  Pace pace = Pace::none;
  double bytes_per_s[2] = {0, 0};  // to the device, to the host; 0: no time passes
  double link_s[2] = {0, 0}, compute_s = 0;  // for how long each has worked

  bool is_on() const { return pace != Pace::none; }
  bool is_counted() const { return pace == Pace::counted; }

  double now_s() {
    if (!is_counted()) return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    auto& clock = t_clock;
    if (clock.standing) return clock.now_s;
    double seen_s = processor_s();
    // A thread begins where the others are: what it was started for is not known here.
    clock.now_s = clock.seen_s < 0 ? latest_s() : clock.now_s + (seen_s - clock.seen_s);
    clock.seen_s = seen_s;
    note(clock.now_s);
    return clock.now_s;
  }

  // Not under the lock of everything, so that others go on while this thread sleeps.
  void wait_until(double then_s) {
    if (!is_on()) return;
    double left_s = then_s - now_s();
    if (left_s <= 0) return;
    if (is_counted()) note(t_clock.now_s = then_s);
    else std::this_thread::sleep_for(std::chrono::duration<double>(left_s));
  }

  // Returns when a copy is through that begins behind `after_s`.
  double pass_link(bool to_host, size_t nbytes, double after_s) {
    Guarded lock(everything());
    if (!is_on() || bytes_per_s[to_host] <= 0) return after_s;
    double seconds = double(nbytes) / bytes_per_s[to_host];
    link_s[to_host] += seconds;
    return free_s_[to_host] = std::max({now_s(), after_s, free_s_[to_host]}) + seconds;
  }

  void begin(Pace with) {
    if (with != pace) free_s_[0] = free_s_[1] = 0;
    pace = with;
  }

 private:
  double latest_s() {
    Guarded lock(everything());
    return latest_s_;
  }
  void note(double now_s) {
    Guarded lock(everything());
    latest_s_ = std::max(latest_s_, now_s);
  }
  double free_s_[2] = {0, 0}, latest_s_ = 0;
};

// The host's clock stands while the emulation works.
struct Standing {
  Standing() {
    if (Timing::all().is_counted() && !t_clock.standing) Timing::all().now_s();
    ++t_clock.standing;
  }
  ~Standing() {
    if (!--t_clock.standing) t_clock.seen_s = processor_s();
  }
  Standing(const Standing&) = delete;
};

}  // namespace late
