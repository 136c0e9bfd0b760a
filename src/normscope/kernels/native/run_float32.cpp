#include "run.hpp"

template int ns::run<float>(const NsCall &, const ns::Problem &);
