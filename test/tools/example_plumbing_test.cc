// The gateway and the replicated log have no plumbing of their own: no nap, no redial loop, no
// outbox. Their program.h, which starts and stops the processes of a demonstration, is not looked
// at.
#include <gtest/gtest.h>

#include <cctype>
#include <filesystem>
#include <regex>
#include <string>
#include <vector>

#include "tools/programs.h"

namespace example_plumbing_test {
namespace {

/// The code without comments and texts.
std::string code_of(const std::string& source) {
  static const std::regex kOther(R"re("(?:[^"\\\n]|\\.)*"|//[^\n]*)re");
  return std::regex_replace(source, kOther, "\"\"");
}

std::vector<std::string> matches(const std::string& code, const std::regex& what) {
  std::vector<std::string> found;
  for (std::sregex_iterator at(code.begin(), code.end(), what), end; at != end; ++at)
    found.push_back(at->str());
  return found;
}

/// Calls that wait: the loop rests by Idler or Engine::wait() alone.
std::vector<std::string> naps_in(const std::string& code) {
  static const std::regex kNap(
      "(?:^|[^A-Za-z_0-9.>])(?:::|std::this_thread::)?(?:sleep|usleep|nanosleep|clock_nanosleep|"
      "sleep_for|sleep_until|pause|poll|ppoll|select|pselect|epoll_wait|sched_yield|yield)\\s*\\(");
  return matches(code, kNap);
}

/// Containers of what is to be sent, and marks of what is to be sent when there is a peer again.
std::vector<std::string> outboxes_in(const std::string& code) {
  static const std::regex kOutbox(
      "(?:deque|queue|vector|list|map)<[^;>(]*(?:Buffer|BufferSlice|Message|std::byte|Bytes)\\b|"
      "\\b(?:outbox|unsent|to_send|backlog|resend|is_waiting|resume)[a-z_]*\\b");
  return matches(code, kOutbox);
}

/// The code before a brace, back to the last statement.
std::string head_of_block(const std::string& code, std::size_t brace) {
  int depth = 0;
  std::size_t at = brace;
  while (at != 0) {
    const char c = code[at - 1];
    if (c == ')') ++depth;
    if (c == '(' && depth-- == 0) break;  // of the call that a lambda is given to
    if (depth == 0 && (c == ';' || c == '{' || c == '}')) break;
    --at;
  }
  return code.substr(at, brace - at);
}

/// Calls that connect or open a session, and stand in a loop or a callback, where they would do so
/// again and again.
std::vector<std::string> redials_in(const std::string& code) {
  static const std::regex kRepeats("\\b(?:for|while|do)\\b|\\]\\s*(?:\\([^{]*\\))?[^{=;]*$");
  static const std::regex kDials("(?:\\.|->)(?:connect|open_session|prepare)\\s*\\(");
  std::vector<std::string> found;
  std::vector<bool> repeats;
  std::size_t statement = 0;  // its first character
  for (std::size_t at = 0; at != code.size(); ++at) {
    const char c = code[at];
    if (c == '{') repeats.push_back(std::regex_search(head_of_block(code, at), kRepeats));
    if (c == '}' && !repeats.empty()) repeats.pop_back();
    if (c == ';' || c == '{' || c == '}') {
      const std::string text = code.substr(statement, at - statement);
      statement = at + 1;
      if (!std::regex_search(text, kDials)) continue;
      const bool in_loop = std::regex_search(text, std::regex("^\\s*(?:for|while|do)\\b"));
      bool in_block = in_loop;
      for (const bool each : repeats) in_block = in_block || each;
      if (in_block) found.push_back(text);
    }
  }
  return found;
}

std::string first_of(const std::vector<std::string>& found) {
  return found.empty() ? std::string() : found.front();
}

TEST(ExamplePlumbing, TheRulesFindWhatTheyForbid) {
  for (const char* nap : {"  usleep(10);", "::nanosleep(&t, nullptr);", "sleep(1);",
                          "std::this_thread::sleep_for(1ms);", "  ::poll(fds, 1, 5);"})
    EXPECT_EQ(naps_in(nap).size(), 1u) << nap;
  for (const char* none :
       {"engine_.poll();", "engine->poll()", "idler.idle(e, 0);", "is_asleep();"})
    EXPECT_TRUE(naps_in(none).empty()) << none;
  for (const char* outbox : {"std::deque<Buffer> waiting_;", "std::vector<BufferSlice> v;",
                             "std::map<int, std::vector<std::byte>> m;", "Positions outbox_;",
                             "if (is_waiting_) place();", "void resume() {"})
    EXPECT_FALSE(outboxes_in(outbox).empty()) << outbox;
  EXPECT_TRUE(outboxes_in("std::deque<Peer> peers_; std::vector<Feed> feeds_;").empty());
  for (const char* redial :
       {"void f() { while (!up) { c = must(engine_.connect(a, o)); } }",
        "void f() { while (!up) c = must(engine_.connect(a, o)); }",
        "void f() { for (;;) { if (x) { s = engine->open_session(a, o); } } }",
        "void f() { o.on_closed = [this](Session, const Error&) { s_ = e_.open_session(a, o); }; }",
        "void f() { on([&] { (void)e_.connect(a, o); }); }"})
    EXPECT_EQ(redials_in(redial).size(), 1u) << redial;
  for (const char* none :
       {"void f() { for (auto& p : all) p.x = 1; c = must(engine_.connect(a, o)); }",
        "void f() { o.on_closed = [this](Session) { stop(); }; s = must(e_.open_session(a, o)); }"})
    EXPECT_TRUE(redials_in(none).empty()) << none;
}

TEST(ExamplePlumbing, TheGatewayAndTheLogHaveNone) {
  int dials = 0;
  for (const char* file : {"gateway/gateway.cc", "replicated-log/replicated_log.cc",
                           "replicated-log/replicated_log.h", "log-client/log_client.cc"}) {
    SCOPED_TRACE(file);
    const std::string path = std::string("tools/examples/") + file;
    ASSERT_TRUE(std::filesystem::exists(path));
    const std::string code = code_of(tools_test::read_file(path));
    EXPECT_EQ(first_of(naps_in(code)), "");
    EXPECT_EQ(first_of(outboxes_in(code)), "");
    EXPECT_EQ(first_of(redials_in(code)), "");
    dials += static_cast<int>(
        matches(code, std::regex("(?:\\.|->)(?:connect|open_session)\\s*\\(")).size());
  }
  EXPECT_GE(dials, 5) << "the rule has seen their connections and sessions";
}

}  // namespace
}  // namespace example_plumbing_test
