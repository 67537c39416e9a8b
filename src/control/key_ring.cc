#include "control/key_ring.h"

#include <fcntl.h>
#include <sodium.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <utility>

#include "base/error.h"
#include "base/unique_fd.h"

namespace spinwire::control {
namespace {

constexpr std::size_t kNameMax = 32;
constexpr std::size_t kFileMax = 8192;
constexpr std::size_t kHexDigits = 2 * sizeof(NoiseSecret::bytes);
constexpr std::string_view kSpace = " \t\r";
constexpr const char* kFormat =
    "give one key a line, \"NAME HEX\", as spinwire-keygen writes it: a name of letters, digits, "
    "'.', '_' and '-', and 64 hexadecimal digits";

tl::unexpected<Error> bad_file(std::string_view path, std::string found, const char* remedy) {
  return base::fail(Status::bad_config, base::format("read the keys in {}", path), std::move(found),
                    remedy);
}

/// Bytes of a file, zeroed when they are dropped.
struct FileBytes {
  std::array<char, kFileMax + 1> bytes{};
  std::size_t size = 0;

  FileBytes() noexcept = default;
  FileBytes(const FileBytes&) = delete;
  FileBytes& operator=(const FileBytes&) = delete;
  ~FileBytes() { sodium_memzero(bytes.data(), bytes.size()); }
};

Result<void> check_file(int fd, const std::string& path) {
  struct stat about {};
  if (::fstat(fd, &about) != 0) {
    const int error = errno;
    return bad_file(path, base::format("fstat: {}", base::errno_text(error)), "see the cause");
  }
  if (!S_ISREG(about.st_mode))
    return bad_file(path, "it is no regular file", "name a file that spinwire-keygen has written");
  if (about.st_uid != ::geteuid() && about.st_uid != 0) {
    return bad_file(path, base::format("it belongs to user {}", about.st_uid),
                    "let it belong to the user of this process, or to root");
  }
  if ((about.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    return bad_file(path,
                    base::format("others than its owner have access to it: its mode is {:04o}",
                                 about.st_mode & 07777u),
                    "take their rights away: chmod 600");
  }
  return {};
}

Result<void> read_file(const std::string& path, FileBytes& to) {
  // Without O_NONBLOCK the open of a pipe would wait.
  const base::UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK));
  if (!fd) {
    const int error = errno;
    return bad_file(path, base::format("open: {}", base::errno_text(error)),
                    error == EMFILE ? base::kProcessFilesRemedy
                    : error == ENFILE
                        ? base::kSystemFilesRemedy
                        : "name a file that this user can read, or make one with spinwire-keygen");
  }
  if (auto good = check_file(fd.get(), path); !good) return good;
  while (to.size < to.bytes.size()) {
    const ssize_t got = ::read(fd.get(), to.bytes.data() + to.size, to.bytes.size() - to.size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      const int error = errno;
      return bad_file(path, base::format("read: {}", base::errno_text(error)), "see the cause");
    }
    if (got == 0) return {};
    to.size += static_cast<std::size_t>(got);
  }
  return bad_file(path, base::format("it has more than {} bytes", kFileMax), kFormat);
}

/// Removes and returns the first word; empty at the end.
std::string_view take_word(std::string_view& text) noexcept {
  text.remove_prefix(std::min(text.find_first_not_of(kSpace), text.size()));
  const std::string_view word = text.substr(0, text.find_first_of(kSpace));
  text.remove_prefix(word.size());
  return word;
}

bool is_name(std::string_view word) noexcept {
  constexpr std::string_view kAllowed =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
  return !word.empty() && word.size() <= kNameMax &&
         word.find_first_not_of(kAllowed) == std::string_view::npos;
}

bool read_hex(std::string_view word, NoiseSecret& to) noexcept {
  std::size_t size = 0;
  const char* end = nullptr;
  return word.size() == kHexDigits &&
         sodium_hex2bin(to.bytes.data(), to.bytes.size(), word.data(), word.size(), nullptr, &size,
                        &end) == 0 &&
         size == to.bytes.size() && end == word.data() + word.size();
}

/// Fills in what follows from the secret: keys of crypto_kdf, of which none tells anything of the
/// others.
void derive(const NoiseSecret& secret, Key& key) noexcept {
  constexpr const char* kContext = "spinwire";
  static_assert(crypto_kdf_KEYBYTES == sizeof(NoiseSecret::bytes) && crypto_kdf_CONTEXTBYTES == 8);
  NoiseSecret psk;
  crypto_kdf_derive_from_key(psk.bytes.data(), psk.bytes.size(), 1, kContext, secret.bytes.data());
  key.psk = NoisePsk(psk);
  crypto_kdf_derive_from_key(key.id.data(), key.id.size(), 2, kContext, secret.bytes.data());
  crypto_kdf_derive_from_key(key.endpoint.bytes.data(), key.endpoint.bytes.size(), 3, kContext,
                             secret.bytes.data());
}

/// Reads one line. Null: it is empty. The error is what is wrong with the line.
tl::expected<std::unique_ptr<Key>, std::string> parse_line(std::string_view line) {
  line = line.substr(0, line.find('#'));
  const std::string_view name = take_word(line);
  if (name.empty()) return nullptr;
  // Neither an error nor the log shows what could be a part of a key; not even the name, in whose
  // place a line may have one.
  if (!is_name(name)) return tl::unexpected<std::string>("its first word is no name of a key");
  NoiseSecret secret;
  if (!read_hex(take_word(line), secret))
    return tl::unexpected(std::string("behind its name are no 64 hexadecimal digits"));
  if (!take_word(line).empty())
    return tl::unexpected(std::string("there is more text behind the key"));
  if (sodium_is_zero(secret.bytes.data(), secret.bytes.size()) != 0)
    return tl::unexpected(std::string("the key is all zeroes"));
  auto key = std::make_unique<Key>();
  key->name = KeyName(name);
  derive(secret, *key);
  return key;
}

}  // namespace

Result<KeyRing> KeyRing::parse(std::string_view text, std::string_view origin) {
  // Without it, libsodium would use code that no processor needs.
  if (::sodium_init() < 0) {
    return base::fail(Status::system, "prepare the cryptography", "sodium_init() failed",
                      "check the installation of libsodium");
  }
  KeyRing ring;
  ring.keys_.reserve(kKeysMax);  // a vector that grows would leave copies of keys behind
  for (int number = 1; !text.empty(); ++number) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    auto key = parse_line(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
    const std::string line = base::format("{}:{}", origin, number);
    if (!key) return bad_file(line, std::move(key.error()), kFormat);
    if (*key == nullptr) continue;
    if (ring.size() == kKeysMax)
      return bad_file(line, base::format("there are more than {} keys", kKeysMax),
                      "remove old ones");
    for (const Key& other : ring.keys_) {
      if (other.name == (*key)->name.view())
        return bad_file(line, base::format("there is a key '{}' already", other.name.view()),
                        "give each key a name of its own");
      if (other.id == (*key)->id)
        return bad_file(line, base::format("it is the key '{}' again", other.name.view()),
                        "remove one of the two");
    }
    ring.keys_.push_back(std::move(**key));
  }
  if (ring.empty()) return bad_file(origin, "it has no key", kFormat);
  return ring;
}

Result<KeyRing> KeyRing::load(const std::string& path) {
  return base::no_throw("read the keys", [&]() -> Result<KeyRing> {
    // libsodium ends the process if the kernel gives no random numbers.
    std::array<std::byte, 1> probe;
    if (::getrandom(probe.data(), probe.size(), GRND_NONBLOCK) != 1) {
      const int error = errno;
      return base::fail(
          Status::system, "prepare the cryptography",
          base::format("getrandom: {}", base::errno_text(error)),
          "let the process call getrandom(), and start it once the kernel's generator is ready");
    }
    FileBytes file;
    if (auto read = read_file(path, file); !read) return tl::unexpected(read.error());
    return parse({file.bytes.data(), file.size}, path);
  });
}

std::string KeyRing::names() const {
  std::string text;
  for (const Key& key : keys_) {
    if (!text.empty()) text += ", ";
    text += key.name.view();
  }
  return text;
}

const Key* KeyRing::find(const KeyId& id) const noexcept {
  const auto at =
      std::find_if(keys_.begin(), keys_.end(), [&](const Key& key) { return key.id == id; });
  return at != keys_.end() ? &*at : nullptr;
}

}  // namespace spinwire::control
