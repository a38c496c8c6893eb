"""Looks for a schedule that is made to measure: `engine.search`, which `schedules.search` is.

Strategy. A schedule is two decisions: in which order each rank runs its forwards and its backwards for the input (the
*skeleton*), and where the backwards for the weights go, which nobody waits for.

    problem     costs and limits as whole numbers
    filling     plays a skeleton and puts each W where its rank would wait otherwise, or where memory asks for it
    slots       grows a skeleton: warm-up forwards, then one backward and one forward per rank in turn
    warm_ups    the shapes of warm-up to try
    climbing    betters a warm-up, a few ranks at a time
    pulling     betters any skeleton: what is ready goes ahead of what is not
    replaying   plays complete orders
    pretending  places W as if costs were a little different
    swapping    swaps neighbours in the chain of steps that makes a rank late
    bound       the time that no schedule can beat: when it is reached, the search is over
    trying      does all this for one placement
    engine      does it for every placement, has the named schedules compete, and returns the best

Waiting is shared out: a rank would rather wait for a forward or a backward than be late for it with a W, as long as it
has not waited more than the rank that has waited most. The longest span of any rank is what counts, so that wait is
free. This idea and the slots follow the greedy schedulers of Zero Bubble Pipeline Parallelism (Qi et al., 2024)
and of Pipeline Parallelism with Controllable Memory (Qi et al., 2024); the climb, the bound and
stages of unequal cost are Echelon's own. Nothing is random, and nothing looks at a clock: the same input gives the
same schedule.

Pure.
"""
