// The calls that the router left to stock last. To find out takes it a tenth of a small call's time, and a program asks
// the same again and again: a call like one of them goes to stock at once.
#pragma once

#include "router.h"

namespace flashsdpa {

// Whether a call was refused on this thread that is equal in all that the decision reads: never a traced or wrapped
// one.
bool refused_before(const Request& request, const Selection& selection);

// `request` was refused under `selection`; its tensors are neither traced nor wrapped.
void remember_refused(const Request& request, const Selection& selection);

// On every thread: what was refused may be served from now on.
void forget_refused_calls();

}  // namespace flashsdpa
