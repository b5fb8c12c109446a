// for_every_schedule: runs a test's body on a fresh device per schedule and fails if the executor saw any fault.
#pragma once

#include <gtest/gtest.h>

#include "simt/device.h"

namespace hetkv::simt {

// Three orders of threads, asynchronous copies late and early, both orders of sums. Outputs must be fresh in every run.
inline const Settings kEverySchedule[] = {
    {.schedule = Schedule::kAscending, .copies = Copies::kLate, .sums = Sums::kInOrder},
    {.schedule = Schedule::kDescending, .copies = Copies::kEarly, .sums = Sums::kPairs},
    {.schedule = Schedule::kShuffled, .seed = 7, .copies = Copies::kLate, .sums = Sums::kInOrder},
};

// `shared_limit`: of the smallest card that the kernel's variant is for.
template <typename Body>
void for_every_schedule(Body&& body, std::size_t shared_limit = Settings{}.shared_limit) {
  static const char* const kNames[] = {"ascending, late copies", "descending, early copies", "shuffled, late copies"};
  for (std::size_t i = 0; i < std::size(kEverySchedule); ++i) {
    SCOPED_TRACE(kNames[i]);
    Settings settings = kEverySchedule[i];
    settings.shared_limit = shared_limit;
    Device device(settings);
    body(device);
    EXPECT_EQ(device.report(), "");
  }
}

}  // namespace hetkv::simt
