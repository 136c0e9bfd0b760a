#include "run.hpp"

template int ns::run<double>(const NsCall &, const ns::Problem &);
