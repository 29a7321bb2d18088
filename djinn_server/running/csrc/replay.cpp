// Replay of a template: run its instructions in order over the boxed dispatcher, without the interpreter's lock.
//
// A program has the instructions of a template that the library can run. A range is a sequence of them: `load` loads the values that it reads,
// `run` issues the ops and returns the values that later instructions need. If a run stops before the end of its range, `unfinished_results`
// returns all existing values, so that Python can continue. `run` throws no exception: `raise_error` rethrows the error of an op, which PyTorch
// converts to the usual Python exception.

#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>
#include <ATen/core/stack.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/ScalarOps.h>
#include <ATen/ops/empty.h>

void check_attention(const at::Tensor& key, const at::Tensor& value);  // of growing.cpp

namespace {

using c10::IValue;
using c10::TypeKind;
using Clock = std::chrono::steady_clock;
using Values = c10::List<IValue>;

// Kinds of arguments in a program's code. `_source_code` in native_replay.py writes these numbers.
enum class Given : int64_t { kDefault, kPlace, kList, kComplex, kScalarTensor };

// How the value of an argument is made when an instruction runs.
enum class Kind : uint8_t {
  kConstant,
  kTensor,
  kOptionalTensor,
  kInteger,
  kReal,
  kNumber,
  kWrappedNumber,
  kComplex,
  kScalarTensor,
  kTensors,
  kOptionalTensors,
  kIntegers,
  kReals,
  kNumbers,
  kBooleans,
};

struct Source {
  Kind kind = Kind::kConstant;
  int64_t place = 0;
  int64_t imaginary = 0;  // place of a complex number's imaginary part
  at::ScalarType dtype = at::kFloat;
  IValue constant{};
  std::vector<Source> items{};
};

struct Made {
  size_t result;
  size_t place;
};

struct Step {
  std::optional<c10::OperatorHandle> op;  // empty if Python runs the instruction
  size_t returns = 0;
  bool sequence = false;
  bool attention = false;  // true for attention, whose lengths are checked before the call
  std::vector<Source> arguments;
  std::vector<Made> makes;
  std::vector<size_t> release;
};

enum class End : int64_t { kDone, kHalted, kTimeOver, kUnfit, kFailed };

// State of the run in this thread: `load` fills the frame, `run` uses it. All values are None between two runs.
struct Frame {
  std::vector<IValue> values;
  std::exception_ptr error;

  Frame() = default;
  Frame(const Frame&) = delete;
  Frame& operator=(const Frame&) = delete;
  // Never freed: an error of a Python kernel refers to objects of the interpreter, which may end before this thread.
  ~Frame() {
    if (error) new std::exception_ptr(std::move(error));
  }
};

Frame& frame_here() {
  thread_local Frame frame;
  return frame;
}

struct Cursor {
  const std::vector<int64_t>& code;
  size_t at = 0;

  int64_t next() {
    TORCH_CHECK(at < code.size(), "the code of a program ends too early");
    return code[at++];
  }
};

void skip(Cursor& cursor) {
  switch (static_cast<Given>(cursor.next())) {
    case Given::kDefault:
      return;
    case Given::kPlace:
      cursor.next();
      return;
    case Given::kList:
      for (int64_t left = cursor.next(); left > 0; --left) skip(cursor);
      return;
    case Given::kComplex:
    case Given::kScalarTensor:
      cursor.next();
      cursor.next();
      return;
  }
  TORCH_CHECK(false, "the code of a program has an unknown kind of argument");
}

// Return a constant as the dispatcher takes it for an argument of a type; empty if only Python can convert it.
std::optional<IValue> constant_for(const IValue& value, const c10::Type& type, bool optional) {
  if (value.isNone()) return optional ? std::optional<IValue>(IValue()) : std::nullopt;
  bool fits = false;
  switch (type.kind()) {
    case TypeKind::BoolType:
      fits = value.isBool();
      break;
    case TypeKind::IntType:
      fits = value.isInt();
      break;
    case TypeKind::NumberType:
      fits = value.isBool();
      break;
    case TypeKind::StringType:
      fits = value.isString();
      break;
    case TypeKind::DeviceObjType:
      fits = value.isDevice();
      break;
    default:
      break;
  }
  return fits ? std::optional<IValue>(value) : std::nullopt;
}

at::Tensor wrapped(const IValue& number) {
  at::Tensor tensor = at::scalar_to_tensor(number.toScalar());
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

// Return `torch.tensor(number, dtype=dtype)`. Undefined if PyTorch would not convert the number as C does.
at::Tensor scalar_tensor(const IValue& number, at::ScalarType dtype) {
  const bool real = dtype == at::kFloat || dtype == at::kDouble;
  if (!(number.isInt() || (number.isDouble() && real)) || !(real || dtype == at::kLong)) return {};
  at::Tensor made = at::empty({}, at::TensorOptions().dtype(dtype));
  const double value = number.isInt() ? static_cast<double>(number.toInt()) : number.toDouble();
  if (dtype == at::kLong) {
    *made.mutable_data_ptr<int64_t>() = number.toInt();
  } else if (dtype == at::kDouble) {
    *made.mutable_data_ptr<double>() = value;
  } else {
    *made.mutable_data_ptr<float>() = static_cast<float>(value);
  }
  return made;
}

std::optional<double> real(const IValue& number) {
  if (number.isDouble()) return number.toDouble();
  return number.isInt() ? std::optional<double>(static_cast<double>(number.toInt())) : std::nullopt;
}

// Return a list whose elements `element` makes, a function of a source and the list. Empty if an element does not fit.
template <typename List, typename Element> std::optional<IValue> listed(List list, const std::vector<Source>& items, Element element) {
  list.reserve(items.size());
  for (const Source& item : items) {
    if (!element(item, list)) return std::nullopt;
  }
  return IValue(std::move(list));
}

class Program : public torch::CustomClassHolder {
 public:
  // `constants` have the first places, and slots the places from there up to `first_input`. `ops` are names such as `aten::add.Tensor`.
  // `numbers` is true for each op that accepts Python's numbers for tensors. `code` has the instructions in order.
  Program(Values constants, int64_t first_input, int64_t places, std::vector<std::string> ops, std::vector<int64_t> numbers,
          std::vector<int64_t> code)
      : constants_(std::move(constants)), first_input_(first_input), tensors_(static_cast<size_t>(places), true) {
    std::vector<std::optional<c10::OperatorHandle>> handles;
    for (const std::string& op : ops) {
      const size_t dot = op.find('.');
      handles.push_back(
          c10::Dispatcher::singleton().findSchema({op.substr(0, dot), dot == std::string::npos ? std::string() : op.substr(dot + 1)}));
    }
    Cursor cursor{code};
    while (cursor.at < code.size()) {
      const int64_t op = cursor.next();
      steps_.emplace_back();
      if (op >= 0) decode(steps_.back(), cursor, handles.at(static_cast<size_t>(op)), numbers.at(static_cast<size_t>(op)) != 0);
    }
  }

  // Return for each instruction the end of the range that begins with it and that the library can run.
  std::vector<int64_t> ends() const {
    std::vector<int64_t> found(steps_.size());
    for (size_t step = steps_.size(); step-- > 0;) {
      const bool next = step + 1 < steps_.size() && steps_[step + 1].op.has_value();
      found[step] = static_cast<int64_t>(!steps_[step].op ? step : next ? static_cast<size_t>(found[step + 1]) : step + 1);
    }
    return found;
  }

  const std::vector<Step>& steps() const { return steps_; }
  int64_t first_input() const { return first_input_; }
  size_t places() const { return tensors_.size(); }

 private:
  // The instruction has no op if Python must run it.
  void decode(Step& step, Cursor& cursor, const std::optional<c10::OperatorHandle>& op, bool numbers) {
    bool fits = op.has_value();
    const int64_t count = cursor.next();
    const c10::FunctionSchema* schema = fits ? &op->schema() : nullptr;
    fits = fits && static_cast<int64_t>(schema->arguments().size()) == count;
    for (int64_t i = 0; i < count; ++i) {
      const size_t before = cursor.at;
      std::optional<Source> source;
      if (fits) source = decode_argument(cursor, schema->arguments()[static_cast<size_t>(i)], numbers);
      cursor.at = before;
      skip(cursor);
      fits = fits && source.has_value();
      if (fits) step.arguments.push_back(std::move(*source));
    }
    step.sequence = cursor.next() != 0;
    for (int64_t left = cursor.next(); left > 0; --left) {
      const size_t result = static_cast<size_t>(cursor.next());
      step.makes.push_back({result, static_cast<size_t>(cursor.next())});
    }
    for (int64_t left = cursor.next(); left > 0; --left) step.release.push_back(static_cast<size_t>(cursor.next()));
    if (!fits || !has_results(*schema, step)) {
      step = Step();
      return;
    }
    step.op = op;
    step.attention = op->schema().name() == "aten::scaled_dot_product_attention";
    step.returns = schema->returns().size();
    for (const Made& made : step.makes) tensors_.at(made.place) = makes_tensor(*schema, step, made.result);
  }

  // Return true if the op returns as many results as the instruction expects. Otherwise Python runs it.
  static bool has_results(const c10::FunctionSchema& schema, const Step& step) {
    const size_t returns = schema.returns().size();
    if (!step.sequence) return step.makes.empty() || returns == 1;
    return returns > 1 || (returns == 1 && schema.returns()[0].type()->kind() == TypeKind::ListType);
  }

  static bool makes_tensor(const c10::FunctionSchema& schema, const Step& step, size_t result) {
    const size_t at = step.sequence && step.returns > 1 ? result : 0;
    if (at >= schema.returns().size()) return false;
    c10::TypePtr type = schema.returns()[at].type();
    if (type->kind() == TypeKind::ListType && step.sequence && step.returns == 1) type = type->castRaw<c10::ListType>()->getElementType();
    return type->kind() == TypeKind::TensorType;
  }

  std::optional<Source> decode_argument(Cursor& cursor, const c10::Argument& argument, bool numbers) const {
    if (static_cast<Given>(cursor.code.at(cursor.at)) == Given::kDefault) {
      cursor.next();
      if (!argument.default_value().has_value()) return std::nullopt;
      Source source;
      source.constant = *argument.default_value();
      return source;
    }
    return decode_source(cursor, *argument.type(), numbers);
  }

  // Return the source of an argument of a type; empty if only Python can make the argument.
  std::optional<Source> decode_source(Cursor& cursor, const c10::Type& given_type, bool numbers) const {
    const bool optional = given_type.kind() == TypeKind::OptionalType;
    const c10::TypePtr element = optional ? given_type.castRaw<c10::OptionalType>()->getElementType() : c10::TypePtr();
    const c10::Type& type = optional ? *element : given_type;
    Source source;
    switch (static_cast<Given>(cursor.next())) {
      case Given::kDefault:
        return std::nullopt;
      case Given::kPlace:
        return decode_place(cursor.next(), type, optional, numbers);
      case Given::kList:
        return decode_list(cursor, type);
      case Given::kComplex:
        source.kind = Kind::kComplex;
        source.place = cursor.next();
        source.imaginary = cursor.next();
        return type.kind() == TypeKind::NumberType ? std::optional<Source>(source) : std::nullopt;
      case Given::kScalarTensor:
        source.kind = Kind::kScalarTensor;
        source.dtype = static_cast<at::ScalarType>(cursor.next());
        source.place = cursor.next();
        return type.kind() == TypeKind::TensorType ? std::optional<Source>(source) : std::nullopt;
    }
    return std::nullopt;
  }

  std::optional<Source> decode_place(int64_t place, const c10::Type& type, bool optional, bool numbers) const {
    Source source;
    source.place = place;
    if (place < static_cast<int64_t>(constants_.size())) {
      std::optional<IValue> constant = constant_for(constants_.get(static_cast<size_t>(place)), type, optional);
      if (!constant) return std::nullopt;
      source.constant = *constant;
      return source;
    }
    if (place >= first_input_) {
      source.kind = optional ? Kind::kOptionalTensor : Kind::kTensor;
      const bool tensor = type.kind() == TypeKind::TensorType && tensors_.at(static_cast<size_t>(place));
      return tensor ? std::optional<Source>(source) : std::nullopt;
    }
    switch (type.kind()) {
      case TypeKind::IntType:
      case TypeKind::SymIntType:
        source.kind = Kind::kInteger;
        return source;
      case TypeKind::FloatType:
        source.kind = Kind::kReal;
        return source;
      case TypeKind::NumberType:
        source.kind = Kind::kNumber;
        return source;
      case TypeKind::TensorType:
        source.kind = Kind::kWrappedNumber;
        return numbers ? std::optional<Source>(source) : std::nullopt;
      default:
        return std::nullopt;
    }
  }

  std::optional<Source> decode_list(Cursor& cursor, const c10::Type& type) const {
    if (type.kind() != TypeKind::ListType) return std::nullopt;
    const c10::TypePtr element = type.castRaw<c10::ListType>()->getElementType();
    Source source;
    switch (element->kind()) {
      case TypeKind::TensorType:
        source.kind = Kind::kTensors;
        break;
      case TypeKind::OptionalType:
        source.kind = Kind::kOptionalTensors;
        break;
      case TypeKind::IntType:
      case TypeKind::SymIntType:
        source.kind = Kind::kIntegers;
        break;
      case TypeKind::FloatType:
        source.kind = Kind::kReals;
        break;
      case TypeKind::NumberType:
        source.kind = Kind::kNumbers;
        break;
      case TypeKind::BoolType:  // of constants: `decode_place` takes no others
        source.kind = Kind::kBooleans;
        break;
      default:
        return std::nullopt;
    }
    if (source.kind == Kind::kOptionalTensors && element->castRaw<c10::OptionalType>()->getElementType()->kind() != TypeKind::TensorType) {
      return std::nullopt;
    }
    for (int64_t left = cursor.next(); left > 0; --left) {
      if (static_cast<Given>(cursor.code.at(cursor.at)) != Given::kPlace) return std::nullopt;
      std::optional<Source> item = decode_source(cursor, *element, false);
      if (!item) return std::nullopt;
      source.items.push_back(std::move(*item));
    }
    return source;
  }

  Values constants_;
  int64_t first_input_;
  std::vector<bool> tensors_;  // by place: true for tensors that instructions of this program make
  std::vector<Step> steps_;
};

template <typename Visit> void visit(const Source& source, Visit read) {
  switch (source.kind) {
    case Kind::kConstant:
      break;
    case Kind::kComplex:
      read(source.imaginary);
      [[fallthrough]];
    case Kind::kTensor:
    case Kind::kOptionalTensor:
    case Kind::kInteger:
    case Kind::kReal:
    case Kind::kNumber:
    case Kind::kWrappedNumber:
    case Kind::kScalarTensor:
      read(source.place);
      break;
    case Kind::kTensors:
    case Kind::kOptionalTensors:
    case Kind::kIntegers:
    case Kind::kReals:
    case Kind::kNumbers:
    case Kind::kBooleans:
      for (const Source& item : source.items) visit(item, read);
      break;
  }
}

std::optional<IValue> list_of(const Source& source, const std::vector<IValue>& values) {
  auto at = [&](const Source& item) -> const IValue& {
    return item.kind == Kind::kConstant ? item.constant : values[static_cast<size_t>(item.place)];
  };
  switch (source.kind) {
    case Kind::kTensors:
      return listed(c10::List<at::Tensor>(), source.items, [&](const Source& item, auto& list) {
        const IValue& value = at(item);
        list.push_back(value.isTensor() ? value.toTensor() : at::Tensor());
        return true;
      });
    case Kind::kOptionalTensors:
      return listed(c10::List<std::optional<at::Tensor>>(), source.items, [&](const Source& item, auto& list) {
        const IValue& value = at(item);
        list.push_back(value.isTensor() ? std::optional<at::Tensor>(value.toTensor()) : std::nullopt);
        return true;
      });
    case Kind::kIntegers:
      return listed(c10::List<int64_t>(), source.items, [&](const Source& item, auto& list) {
        const IValue& value = at(item);
        if (value.isInt()) list.push_back(value.toInt());
        return value.isInt();
      });
    case Kind::kReals:
      return listed(c10::List<double>(), source.items, [&](const Source& item, auto& list) {
        const std::optional<double> number = real(at(item));
        if (number) list.push_back(*number);
        return number.has_value();
      });
    case Kind::kNumbers:
      return listed(c10::List<at::Scalar>(), source.items, [&](const Source& item, auto& list) {
        const IValue& value = at(item);
        if (value.isScalar()) list.push_back(value.toScalar());
        return value.isScalar();
      });
    case Kind::kBooleans:
      return listed(c10::List<bool>(), source.items, [&](const Source& item, auto& list) {
        list.push_back(at(item).toBool());
        return true;
      });
    default:
      return std::nullopt;
  }
}

// Push an argument. Return false if Python must convert or refuse its value.
bool push(const Source& source, const std::vector<IValue>& values, torch::jit::Stack& stack) {
  const IValue& value = values[static_cast<size_t>(source.place)];
  switch (source.kind) {
    case Kind::kConstant:
      stack.push_back(source.constant);
      return true;
    case Kind::kTensor:
      if (value.isTensor()) stack.push_back(value);
      else stack.emplace_back(at::Tensor());  // an op returned an undefined tensor
      return true;
    case Kind::kOptionalTensor:
      stack.push_back(value);
      return true;
    case Kind::kInteger:
      stack.push_back(value);
      return value.isInt();
    case Kind::kNumber:
      stack.push_back(value);
      return value.isScalar();
    case Kind::kReal: {
      const std::optional<double> number = real(value);
      if (number) stack.emplace_back(*number);
      return number.has_value();
    }
    case Kind::kWrappedNumber:
      if (!value.isScalar()) return false;
      stack.emplace_back(wrapped(value));
      return true;
    case Kind::kComplex: {
      const std::optional<double> first = real(value), second = real(values[static_cast<size_t>(source.imaginary)]);
      if (first && second) stack.emplace_back(c10::complex<double>(*first, *second));
      return first && second;
    }
    case Kind::kScalarTensor: {
      at::Tensor made = scalar_tensor(value, source.dtype);
      if (!made.defined()) return false;
      stack.emplace_back(std::move(made));
      return true;
    }
    default:
      break;
  }
  std::optional<IValue> list = list_of(source, values);
  if (list) stack.push_back(std::move(*list));
  return list.has_value();
}

// Undefined tensors become None, as in Python.
void keep(IValue value, IValue& place) { place = value.isTensor() && !value.toTensor().defined() ? IValue() : std::move(value); }

void store(const Step& step, torch::jit::Stack& stack, std::vector<IValue>& values) {
  if (!step.sequence) {
    for (const Made& made : step.makes) keep(stack.at(0), values[made.place]);
    return;
  }
  const bool tuple = step.returns > 1;
  const c10::ArrayRef<IValue> results = tuple ? c10::ArrayRef<IValue>(stack) : stack.at(0).toListRef();
  for (const Made& made : step.makes) {
    TORCH_CHECK_INDEX(made.result < results.size(), tuple ? "tuple index out of range" : "list index out of range");
    keep(results[made.result], values[made.place]);
  }
}

// The instructions of a program from `start` to `stop` (exclusive). The library runs all of them.
class Range : public torch::CustomClassHolder {
 public:
  Range(c10::intrusive_ptr<Program> program, int64_t start, int64_t stop) : program_(std::move(program)), start_(start), stop_(stop) {
    enum : uint8_t { kUnknown, kRead, kMade, kReadAndReleased, kReleased };
    const int64_t first_input = program_->first_input();
    std::unordered_map<int64_t, uint8_t> state;
    std::vector<int64_t> touched;
    first_slot_ = first_input;
    for (int64_t at = start; at < stop; ++at) {
      const Step& step = program_->steps().at(static_cast<size_t>(at));
      TORCH_CHECK(step.op.has_value(), "a range has an instruction that Python runs");
      auto read = [&](int64_t place) {
        if (place < first_input) {
          first_slot_ = std::min(first_slot_, place);
          end_slot_ = std::max(end_slot_, place + 1);
        } else if (state[place] == kUnknown) {
          state[place] = kRead;
          touched.push_back(place);
        }
      };
      for (const Source& argument : step.arguments) visit(argument, read);
      for (const Made& made : step.makes) {
        const int64_t place = static_cast<int64_t>(made.place);
        if (state[place] == kUnknown) touched.push_back(place);
        state[place] = kMade;
      }
      for (size_t released : step.release) {
        uint8_t& place = state[static_cast<int64_t>(released)];
        place = place == kRead ? kReadAndReleased : kReleased;
      }
    }
    first_slot_ = std::min(first_slot_, end_slot_);
    slots_.resize(static_cast<size_t>(end_slot_ - first_slot_));
    for (int64_t place : touched) {
      const uint8_t found = state[place];
      if (found == kRead || found == kReadAndReleased) reads_.push_back(place);
      if (found == kReadAndReleased) released_.push_back(place);
      if (found == kMade) result_places_.push_back(place);
    }
  }

  // Places of the values that the range reads, of those that it also releases, and of the results that later instructions need.
  std::vector<int64_t> reads() const { return reads_; }
  std::vector<int64_t> released() const { return released_; }
  std::vector<int64_t> result_places() const { return result_places_; }
  // Places of the first slot that the range reads, and of the end of its slots (exclusive).
  std::tuple<int64_t, int64_t> slots() const { return {first_slot_, end_slot_}; }

  // Load the values at `reads`, and the slots that have changed since the last call. `places` counts from the range's first slot.
  void load(c10::List<at::Tensor> values, const std::vector<int64_t>& places, Values changed) {
    TORCH_CHECK(values.size() == reads_.size() && places.size() == changed.size(), "the loaded values do not fit the range");
    for (size_t i = 0; i < places.size(); ++i) slots_.at(static_cast<size_t>(places[i])) = changed.get(i);
    Frame& frame = frame_here();
    // A source without a value refers to a place after the last one.
    if (frame.values.size() <= program_->places()) frame.values.resize(program_->places() + 1);
    frame.error = nullptr;
    for (size_t i = 0; i < reads_.size(); ++i) {
      frame.values[static_cast<size_t>(reads_[i])] = values.extract(i);
    }
    std::copy(slots_.begin(), slots_.end(), frame.values.begin() + first_slot_);
  }

  // Run the instructions on the loaded values. Return the number of the first instruction that has not run, the reason (`End`), and the
  // values at `result_places` if all have run. `halt` and `progress` are addresses of integers, or 0: `halt` becomes nonzero when no further
  // instruction may run, `progress` receives the number of each instruction. A positive `seconds` limits the time of the run.
  std::tuple<int64_t, int64_t, Values> run(int64_t halt, int64_t progress, double seconds) const {
    const auto [at, end] =
        run_loaded(reinterpret_cast<const std::atomic<int>*>(halt), reinterpret_cast<std::atomic<int>*>(progress), seconds);
    return {at, static_cast<int64_t>(end), end == End::kDone ? take(result_places_) : Values(c10::AnyType::get())};
  }

  // Return the places of the values that exist after a run that stopped early, and the values.
  std::tuple<std::vector<int64_t>, Values> unfinished_results() const {
    std::vector<int64_t> found;
    const std::vector<IValue>& values = frame_here().values;
    for (size_t place = static_cast<size_t>(program_->first_input()); place < program_->places(); ++place) {
      if (!values[place].isNone()) found.push_back(static_cast<int64_t>(place));
    }
    Values taken = take(found);
    return {std::move(found), std::move(taken)};
  }

  // Throw the error of the op at which the last run failed.
  void raise_error() const {
    if (std::exception_ptr error = std::exchange(frame_here().error, nullptr)) std::rethrow_exception(error);
  }

 private:
  std::pair<int64_t, End> run_loaded(const std::atomic<int>* halted, std::atomic<int>* progress, double seconds) const {
    Frame& frame = frame_here();
    const bool limited = seconds > 0;
    const auto until = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(limited ? seconds : 0));
    torch::jit::Stack stack;
    int64_t at = start_;
    try {
      for (; at < stop_; ++at) {
        if (halted != nullptr && halted->load(std::memory_order_relaxed) != 0) return {at, End::kHalted};
        if (limited && at > start_ && Clock::now() > until) return {at, End::kTimeOver};
        if (progress != nullptr) progress->store(static_cast<int>(at), std::memory_order_relaxed);
        const Step& step = program_->steps()[static_cast<size_t>(at)];
        stack.clear();
        for (const Source& argument : step.arguments) {
          if (!push(argument, frame.values, stack)) return {at, End::kUnfit};
        }
        if (step.attention) check_attention(stack.at(1).toTensor(), stack.at(2).toTensor());
        step.op->callBoxed(stack);
        store(step, stack, frame.values);
        stack.clear();
        for (size_t place : step.release) frame.values[place] = IValue();
      }
    } catch (...) {
      frame.error = std::current_exception();
      return {at, End::kFailed};
    }
    return {at, End::kDone};
  }

  // Return the values at these places, and clear the frame.
  Values take(const std::vector<int64_t>& places) const {
    std::vector<IValue>& values = frame_here().values;
    Values found(c10::AnyType::get());
    found.reserve(places.size());
    for (int64_t place : places) found.push_back(std::exchange(values.at(static_cast<size_t>(place)), IValue()));
    for (int64_t place : reads_) values[static_cast<size_t>(place)] = IValue();
    for (int64_t slot = first_slot_; slot < end_slot_; ++slot) values[static_cast<size_t>(slot)] = IValue();
    return found;
  }

  c10::intrusive_ptr<Program> program_;
  int64_t start_;
  int64_t stop_;
  int64_t first_slot_ = 0;
  int64_t end_slot_ = 0;
  std::vector<int64_t> reads_;
  std::vector<int64_t> released_;
  std::vector<int64_t> result_places_;
  std::vector<IValue> slots_;  // slots of the last run
};

}  // namespace

TORCH_LIBRARY(djinn_replay, library) {
  library.class_<Program>("Program")
      .def(torch::init<Values, int64_t, int64_t, std::vector<std::string>, std::vector<int64_t>, std::vector<int64_t>>())
      .def("ends", &Program::ends);
  library.class_<Range>("Range")
      .def(torch::init<c10::intrusive_ptr<Program>, int64_t, int64_t>())
      .def("reads", &Range::reads)
      .def("released", &Range::released)
      .def("result_places", &Range::result_places)
      .def("slots", &Range::slots)
      .def("load", &Range::load)
      .def("run", &Range::run)
      .def("unfinished_results", &Range::unfinished_results)
      .def("raise_error", &Range::raise_error);
}
