// SPDX-License-Identifier: Apache-2.0
#include "server/http_message.h"

#include <ctime>

namespace spin::server {

std::string_view reason_phrase(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 204:
      return "No Content";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 403:
      return "Forbidden";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 408:
      return "Request Timeout";
    case 413:
      return "Content Too Large";
    case 414:
      return "URI Too Long";
    case 415:
      return "Unsupported Media Type";
    case 417:
      return "Expectation Failed";
    case 429:
      return "Too Many Requests";
    case 431:
      return "Request Header Fields Too Large";
    case 500:
      return "Internal Server Error";
    case 501:
      return "Not Implemented";
    case 503:
      return "Service Unavailable";
    default:
      return "Unknown";
  }
}

std::string ascii_lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return out;
}

bool ascii_iequals(std::string_view a, std::string_view b) {
  return a.size() == b.size() && ascii_lower(a) == ascii_lower(b);
}

namespace {

// IMF-fixdate, without the locale that strftime's names would follow.
void append_date(std::string& out) {
  static constexpr const char* kDays[] = {"Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"};
  static constexpr const char* kMonths[] = {"Jan", "Feb", "Mar", "Apr", "May", "Jun",
                                            "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"};
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  if (gmtime_r(&now, &utc) == nullptr) return;
  auto two = [&out](int value) {
    out += static_cast<char>('0' + value / 10 % 10);
    out += static_cast<char>('0' + value % 10);
  };
  out += "Date: ";
  out += kDays[utc.tm_wday];
  out += ", ";
  two(utc.tm_mday);
  out += ' ';
  out += kMonths[utc.tm_mon];
  out += ' ';
  out += std::to_string(utc.tm_year + 1900);
  out += ' ';
  two(utc.tm_hour);
  out += ':';
  two(utc.tm_min);
  out += ':';
  two(utc.tm_sec);
  out += " GMT\r\n";
}

}  // namespace

std::string format_response_head(const HttpResponse& response,
                                 int version,
                                 bool keep_alive,
                                 std::optional<uint64_t> body_bytes) {
  std::string out = "HTTP/1.1 ";
  out += std::to_string(response.status);
  out += ' ';
  out += reason_phrase(response.status);
  out += "\r\n";
  append_date(out);
  if (!response.content_type.empty()) {
    out += "Content-Type: ";
    out += response.content_type;
    out += "\r\n";
  }
  for (const auto& [name, value] : response.fields) {
    out += name;
    out += ": ";
    out += value;
    out += "\r\n";
  }
  if (body_bytes) {
    out += "Content-Length: ";
    out += std::to_string(*body_bytes);
    out += "\r\n";
  } else if (version >= 11) {
    out += "Transfer-Encoding: chunked\r\n";
  }
  if (!keep_alive) {
    out += "Connection: close\r\n";
  } else if (version < 11) {
    out += "Connection: keep-alive\r\n";
  }
  out += "\r\n";
  return out;
}

}  // namespace spin::server
