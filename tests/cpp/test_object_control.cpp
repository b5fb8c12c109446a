// The object word: its bits, every operation in every state, counts that never wrap, and threads. The state x operation table of
// csrc/allocator/README.md is generated from the code here and compared with the file.
#include "allocator/object_control.h"

#include <gtest/gtest.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <functional>
#include <latch>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace hetkv {
namespace {

using Word = std::atomic<std::uint64_t>;
constexpr std::array kStates{ObjectState::kAbsent, ObjectState::kFilling, ObjectState::kSealed, ObjectState::kEvicting,
                             ObjectState::kBroken};
constexpr std::uint32_t kGen = 7;

static_assert(ObjectWord::make(ObjectState::kBroken, 31, 65535, 1048575, 1048575).bits ==
              (~std::uint64_t{0} & ~std::uint64_t{7}) + 4);
static_assert(ObjectWord::make(ObjectState::kSealed, 3, 5, 9, 77).add_pins(1).add_kids(-2) ==
              ObjectWord::make(ObjectState::kSealed, 3, 6, 7, 77));

ObjectWord word(ObjectState state, std::uint32_t pins, std::uint32_t kids, std::uint32_t gen = kGen) {
  return ObjectWord::make(state, 0b101, pins, kids, gen);
}

std::string reason(Transition t) {
  switch (t) {
    case Transition::kDone:
      return "done";
    case Transition::kWrongState:
      return "wrong state";
    case Transition::kWrongGeneration:
      return "wrong generation";
    case Transition::kPinned:
      return "pinned";
    case Transition::kHasKids:
      return "has kids";
    case Transition::kFull:
      return "full";
  }
  return "?";
}

std::string after(Released r) {
  switch (r) {
    case Released::kAlive:
      return "alive";
    case Released::kLastOfSealed:
      return "last of sealed";
    case Released::kReapBroken:
      return "reap broken";
  }
  return "?";
}

// An operation of the table, tried on a word with the least counts that it may be called with.
struct Operation {
  std::string name;
  std::uint32_t pins, kids;
  std::function<std::string(ObjectControl)> run;
};

std::vector<Operation> operations() {
  return {
      {"begin_fill", 0, 0,
       [](ObjectControl c) {
         std::uint32_t gen = 0;
         return reason(c.begin_fill(&gen));
       }},
      {"seal", 1, 0, [](ObjectControl c) { return reason(c.seal(kGen)); }},
      {"abandon_fill", 1, 0, [](ObjectControl c) { return reason(c.abandon_fill(kGen)); }},
      {"pin", 0, 0, [](ObjectControl c) { return reason(c.pin(kGen)); }},
      {"pin_again", 1, 0, [](ObjectControl c) { return reason(c.pin_again()); }},
      {"unpin", 1, 0, [](ObjectControl c) { return after(c.unpin()); }},
      {"add_kid", 1, 0, [](ObjectControl c) { return reason(c.add_kid()); }},
      {"drop_kid", 0, 1, [](ObjectControl c) { return after(c.drop_kid()); }},
      {"break_object", 0, 0, [](ObjectControl c) { return reason(c.break_object(kGen)); }},
      {"begin_evict", 0, 0, [](ObjectControl c) { return reason(c.begin_evict(kGen)); }},
      {"finish_evict", 0, 0,
       [](ObjectControl c) {
         c.finish_evict();
         return std::string("done");
       }},
  };
}

// What the caller of an operation must have makes some pairs impossible: the code aborts on them, or nobody can be there.
bool cannot_happen(const Operation& operation, ObjectState state) {
  const bool quiet = state == ObjectState::kAbsent || state == ObjectState::kEvicting;  // pins = 0 and kids = 0
  if (operation.name == "finish_evict") return state != ObjectState::kEvicting;
  if (operation.name == "add_kid" || operation.name == "pin_again" || operation.name == "unpin" || operation.name == "drop_kid")
    return quiet;
  return false;
}

std::string cell(const Operation& operation, ObjectState state) {
  if (cannot_happen(operation, state)) return "—";
  const bool quiet = state == ObjectState::kAbsent || state == ObjectState::kEvicting;
  Word bits{word(state, quiet ? 0 : operation.pins, quiet ? 0 : operation.kids).bits};
  const std::string result = operation.run(ObjectControl(bits));
  const ObjectState now = ObjectControl(bits).load().state();
  if (now == state) return result;
  return result + " → " + std::string(state_name(now));
}

std::string table() {
  std::ostringstream out;
  out << "| operation |";
  for (const ObjectState state : kStates) out << " " << state_name(state) << " |";
  out << "\n|---|---|---|---|---|---|\n";
  for (const Operation& operation : operations()) {
    out << "| `" << operation.name << "` |";
    for (const ObjectState state : kStates) out << " " << cell(operation, state) << " |";
    out << "\n";
  }
  return out.str();
}

TEST(ObjectControl, ReadmeTableIsWhatTheCodeDoes) {
  const std::filesystem::path readme = std::filesystem::path(__FILE__).parent_path() / "../../csrc/allocator/README.md";
  std::ifstream in(readme);
  ASSERT_TRUE(in) << readme;
  std::stringstream text;
  text << in.rdbuf();
  EXPECT_NE(text.str().find(table()), std::string::npos) << "put this into csrc/allocator/README.md:\n" << table();
}

TEST(ObjectControl, OneLife) {
  Word bits{0};
  ObjectControl c(bits);
  std::uint32_t gen = 0;
  ASSERT_EQ(c.begin_fill(&gen), Transition::kDone);
  EXPECT_EQ(gen, 1u);
  EXPECT_EQ(c.load().pins(), 1u) << "the filler's pin";
  EXPECT_EQ(c.pin(gen), Transition::kWrongState) << "not visible yet";
  EXPECT_EQ(c.begin_evict(gen), Transition::kWrongState);
  ASSERT_EQ(c.seal(gen), Transition::kDone);
  EXPECT_EQ(c.seal(gen), Transition::kWrongState);
  ASSERT_EQ(c.pin(gen), Transition::kDone);
  EXPECT_EQ(c.begin_evict(gen), Transition::kPinned);
  EXPECT_EQ(c.unpin(), Released::kAlive);
  ASSERT_EQ(c.add_kid(), Transition::kDone);
  EXPECT_EQ(c.unpin(), Released::kAlive) << "a child is left";
  EXPECT_EQ(c.begin_evict(gen), Transition::kHasKids);
  EXPECT_EQ(c.drop_kid(), Released::kLastOfSealed);
  ASSERT_EQ(c.begin_evict(gen), Transition::kDone);
  EXPECT_EQ(c.pin(gen), Transition::kWrongState);
  c.finish_evict();
  ASSERT_EQ(c.begin_fill(&gen), Transition::kDone);
  EXPECT_EQ(gen, 2u);
  EXPECT_EQ(c.pin(1), Transition::kWrongGeneration) << "an old reference never pins the next life";
}

TEST(ObjectControl, ABrokenObjectGoesWithItsLastUser) {
  Word bits{word(ObjectState::kSealed, 1, 1).bits};
  ObjectControl c(bits);
  ASSERT_EQ(c.break_object(kGen), Transition::kDone) << "pins and kids do not refuse a quarantine";
  EXPECT_EQ(c.break_object(kGen), Transition::kWrongState);
  EXPECT_EQ(c.load().pins(), 1u);
  EXPECT_EQ(c.load().kids(), 1u);
  EXPECT_EQ(c.pin(kGen), Transition::kWrongState);
  EXPECT_EQ(c.add_kid(), Transition::kWrongState);
  EXPECT_EQ(c.unpin(), Released::kAlive);
  EXPECT_EQ(c.drop_kid(), Released::kReapBroken);
  EXPECT_EQ(c.begin_evict(kGen), Transition::kDone);
}

TEST(ObjectControl, AFillThatWasBrokenCannotBeSealed) {
  Word bits{word(ObjectState::kFilling, 1, 0).bits};
  ObjectControl c(bits);
  ASSERT_EQ(c.break_object(kGen), Transition::kDone);
  EXPECT_EQ(c.seal(kGen), Transition::kWrongState);
  ASSERT_EQ(c.abandon_fill(kGen), Transition::kDone);
  EXPECT_EQ(c.load(), ObjectWord::make(ObjectState::kAbsent, 0, 0, 0, kGen));
}

TEST(ObjectControl, AbandonNamesWhatHoldsIt) {
  Word bits{word(ObjectState::kFilling, 2, 0).bits};
  EXPECT_EQ(ObjectControl(bits).abandon_fill(kGen), Transition::kPinned);
  bits = word(ObjectState::kFilling, 1, 1).bits;
  EXPECT_EQ(ObjectControl(bits).abandon_fill(kGen), Transition::kHasKids);
  bits = word(ObjectState::kFilling, 1, 0).bits;
  EXPECT_EQ(ObjectControl(bits).abandon_fill(kGen + 1), Transition::kWrongGeneration);
}

TEST(ObjectControl, FullCountsRefuse) {
  Word bits{word(ObjectState::kSealed, ObjectWord::kMaxPins, ObjectWord::kMaxKids, ObjectWord::kMaxGen).bits};
  ObjectControl c(bits);
  const ObjectWord before = c.load();
  EXPECT_EQ(c.pin(ObjectWord::kMaxGen), Transition::kFull);
  EXPECT_EQ(c.pin_again(), Transition::kFull);
  EXPECT_EQ(c.add_kid(), Transition::kFull);
  EXPECT_EQ(c.load(), before);
}

TEST(ObjectControl, FlagsTouchNothingElse) {
  Word bits{ObjectWord::make(ObjectState::kSealed, 0b00101, 3, 4, kGen).bits};
  ObjectControl c(bits);
  EXPECT_EQ(c.set_flags(0b10010, 0b00100), Transition::kDone);
  EXPECT_EQ(c.load(), ObjectWord::make(ObjectState::kSealed, 0b10011, 3, 4, kGen));
}

TEST(ObjectControl, GenerationsStayInTheirField) {
  Word bits{ObjectWord::make(ObjectState::kAbsent, 0, 0, 0, ObjectWord::kMaxGen).bits};
  std::uint32_t gen = 1;
  ASSERT_EQ(ObjectControl(bits).begin_fill(&gen), Transition::kDone);
  EXPECT_EQ(gen, 0u);
  EXPECT_EQ(ObjectControl(bits).load(), ObjectWord::make(ObjectState::kFilling, 0, 1, 0, 0));
}

TEST(ObjectControlDeathTest, CountsBelowZeroAbort) {
  Word bits{word(ObjectState::kSealed, 0, 0).bits};
  ObjectControl c(bits);
  EXPECT_DEATH(c.unpin(), "unpin without a pin");
  EXPECT_DEATH(c.pin_again(), "pin_again without a pin");
  EXPECT_DEATH(c.drop_kid(), "child count below zero");
  EXPECT_DEATH(c.finish_evict(), "finish_evict without begin_evict");
}

// Readers pin and read the body, one thread evicts and refills it: a pinned body never changes, and never belongs to another life.
TEST(ObjectControlThreads, APinKeepsTheBody) {
  Word bits{0};
  std::uint64_t body = 0;  // plain memory: read under a pin, written while FILLING
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> pinned{0}, wrong{0}, lives{0};
  std::latch gate(3);
  const auto read = [&] {
    gate.arrive_and_wait();
    ObjectControl c(bits);
    while (!stop) {
      const std::uint32_t gen = c.load().gen();
      if (c.pin(gen) != Transition::kDone) continue;
      if (body != gen) ++wrong;
      ++pinned;
      c.unpin();
    }
  };
  std::thread a(read), b(read);
  gate.arrive_and_wait();
  ObjectControl c(bits);
  while (lives < 20000 || pinned < 1000) {
    std::uint32_t gen = 0;
    ASSERT_EQ(c.begin_fill(&gen), Transition::kDone);
    body = gen;
    ASSERT_EQ(c.seal(gen), Transition::kDone);
    c.unpin();
    if (lives % 64 == 0) std::this_thread::yield();
    while (c.begin_evict(gen) != Transition::kDone) std::this_thread::yield();
    body = ~std::uint64_t{0};
    c.finish_evict();
    ++lives;
  }
  stop = true;
  a.join();
  b.join();
  EXPECT_EQ(wrong, 0u);
}

}  // namespace
}  // namespace hetkv
