// SPDX-License-Identifier: MIT OR Apache-2.0
//
// dmafile in C++17: handles that free themselves, failures that are exceptions.
//
//     c++ -std=c++17 load.cpp $(pkg-config --cflags --libs dmafile) -o load++
//     ./load++ FILE            loads it into private memory, and prints some of it
//     ./load++ MODEL TENSOR... loads some tensors of a model: names, or globs

#include <dmafile.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <numeric>
#include <string>
#include <system_error>
#include <vector>

namespace dmafile {

// The message of the last failure in this thread.
inline std::string sentence()
{
    std::string text(1024, '\0');
    const int whole = dmafile_strerror_r(text.data(), text.size());
    if (whole >= 0 && static_cast<std::size_t>(whole) < text.size()) {
        text.resize(static_cast<std::size_t>(whole));
    }
    return text;
}

class Error : public std::system_error {
public:
    explicit Error(int number)
        : std::system_error(number, std::generic_category()), sentence_(sentence())
    {
    }
    const char *what() const noexcept override { return sentence_.c_str(); }

private:
    std::string sentence_;
};

inline void check(int status)
{
    if (status < 0) {
        throw Error(-status);
    }
}

struct Free {
    void operator()(dmafile_buffer *buffer) const noexcept { dmafile_buffer_free(buffer); }
    void operator()(dmafile_model *model) const noexcept { dmafile_model_free(model); }
};

inline dmafile_options defaults()
{
    dmafile_options options{};
    options.size = sizeof options;
    return options;
}

// Bytes that cannot change.
struct View {
    const std::uint8_t *data;
    std::uint64_t size;
    const std::uint8_t *begin() const { return data; }
    const std::uint8_t *end() const { return data + size; }
};

class Buffer {
public:
    static Buffer load(const std::string &path, const dmafile_options &options)
    {
        dmafile_buffer *raw = nullptr;
        check(dmafile_load(path.c_str(), &options, &raw));
        return Buffer(raw);
    }

    explicit Buffer(dmafile_buffer *raw) : handle_(raw) {}

    // For private or sealed memory; for other memory use seal() or dmafile_buffer_read_at.
    View view() const
    {
        const void *data = dmafile_buffer_data(handle_.get());
        if (data == nullptr) {
            throw Error(errno);
        }
        return {static_cast<const std::uint8_t *>(data), dmafile_buffer_len(handle_.get())};
    }

    int fd() const
    {
        const int fd = dmafile_buffer_fd(handle_.get());
        check(fd);
        return fd;
    }

    void seal() { check(dmafile_buffer_seal(handle_.get())); }

private:
    std::unique_ptr<dmafile_buffer, Free> handle_;
};

class Model {
public:
    explicit Model(const std::string &path)
    {
        dmafile_model *raw = nullptr;
        check(dmafile_model_open(path.c_str(), &raw));
        handle_.reset(raw);
    }

    std::size_t size() const { return dmafile_model_tensor_count(handle_.get()); }

    const dmafile_tensor &operator[](std::size_t index) const
    {
        const dmafile_tensor *tensor = dmafile_model_tensor(handle_.get(), index);
        if (tensor == nullptr) {
            throw Error(errno);
        }
        return *tensor;
    }

    Buffer load(const std::vector<const char *> &tensors, const dmafile_options &options) const
    {
        dmafile_buffer *raw = nullptr;
        check(dmafile_model_load(handle_.get(), &options, tensors.data(), tensors.size(), &raw));
        return Buffer(raw);
    }

private:
    std::unique_ptr<dmafile_model, Free> handle_;
};

} // namespace dmafile

static std::uint64_t sum(const std::uint8_t *begin, const std::uint8_t *end)
{
    return std::accumulate(begin, end, std::uint64_t{0});
}

static void look_at_file(const std::string &path)
{
    std::uint64_t told = 0;
    auto options = dmafile::defaults();
    options.to = "anon";
    options.progress = [](std::uint64_t done, std::uint64_t, void *user) {
        *static_cast<std::uint64_t *>(user) = done;
    };
    options.user = &told;
    const auto buffer = dmafile::Buffer::load(path, options);
    const auto bytes = buffer.view();
    std::printf("bytes %ju\nmoved %ju\nsum %ju\n", static_cast<std::uintmax_t>(bytes.size),
                static_cast<std::uintmax_t>(told),
                static_cast<std::uintmax_t>(sum(bytes.begin(), bytes.end())));
}

static void look_at_tensors(const std::string &path, const std::vector<const char *> &tensors)
{
    const dmafile::Model model(path);
    auto options = dmafile::defaults();
    options.to = "memfd";
    auto buffer = model.load(tensors, options);
    // From here on no process can change it, even with the descriptor.
    buffer.seal();
    const auto bytes = buffer.view();
    for (std::size_t i = 0; i < model.size(); i++) {
        const auto &tensor = model[i];
        const auto *begin = bytes.data + tensor.at;
        std::printf("%s %s [", tensor.name, tensor.dtype);
        for (std::size_t d = 0; d < tensor.ndim; d++) {
            std::printf(d == 0 ? "%ju" : ", %ju", static_cast<std::uintmax_t>(tensor.shape[d]));
        }
        // A tensor that was not selected may be all zero here.
        std::printf("] sum %ju\n",
                    static_cast<std::uintmax_t>(sum(begin, begin + tensor.bytes)));
    }
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        std::fprintf(stderr, "usage: load++ FILE\n       load++ MODEL TENSOR...\n");
        return 2;
    }
    try {
        if (argc == 2) {
            look_at_file(argv[1]);
        } else {
            look_at_tensors(argv[1], std::vector<const char *>(argv + 2, argv + argc));
        }
    } catch (const std::exception &error) {
        std::fprintf(stderr, "load++: %s\n", error.what());
        return 1;
    }
    return 0;
}
