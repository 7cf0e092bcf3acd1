// SPDX-License-Identifier: MIT
#pragma once

// The threads that compute a graph together: a calling thread and its workers, in the place of OpenMP's. A thread that
// waits for the others spins and then sleeps. It spins long while all of them get a core when they want one, and
// briefly once one has to wait for it: the spinning would take the time that the other lacks. A user fixes the number
// of spins by GOMP_SPINCOUNT or OMP_WAIT_POLICY, which have libgomp's meaning.

#ifdef __cplusplus
extern "C" {
#endif

struct thread_team;

// Returns the team of the calling thread, and sets *n_threads to the threads that it has: fewer than wanted if no more
// can be started. The team is made when first needed; its workers are joined when the calling thread ends.
struct thread_team * thread_team_of_caller(int * n_threads);

// Calls work(data, 0) in the calling thread and work(data, i) in workers 1 to n_threads - 1. Returns when work(data, 0)
// does: `work` must end with thread_team_wait and must not touch `data` after it.
// REQUIRES: `team` is the calling thread's; n_threads is at most what thread_team_of_caller told.
void thread_team_run(struct thread_team * team, int n_threads, void (*work)(void * data, int i), void * data);

// A barrier: returns when all n_threads threads of a run have called it. REQUIRES: called within `work`.
void thread_team_wait(struct thread_team * team, int n_threads);

#ifdef __cplusplus
}
#endif
