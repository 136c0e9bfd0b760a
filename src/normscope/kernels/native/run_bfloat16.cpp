#include "run.hpp"

template int ns::run<ns::BFloat16>(const NsCall &, const ns::Problem &);
