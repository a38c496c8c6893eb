"""Search for a schedule tailored to given costs: `engine.search`, also available as `schedules.search`.

Strategy. A schedule is two decisions: the order in which each rank runs its forwards and input gradients (the
*skeleton*), and the places of the weight gradients, which no other step waits for.

    problem           costs and limits as whole numbers; the lower bound, which ends the search when it is reached
    weight_placement  plays a skeleton, and puts each W where its rank would idle, or where memory requires it
    greedy            builds a skeleton: warm-up forwards of many shapes, then one backward and one forward per rank
    list_scheduler    improves a skeleton: actions with an input overtake actions without
    local_search      plays complete orders; improves warm-ups by hill climbing, and complete orders by swaps
    engine            runs all of this for every placement, compares with the named schedules, and returns the best

Idle time is shared out. A rank whose next W would delay an F or I waits instead, as long as it has not waited more than
the rank that has waited most. Only the longest span of any rank counts, so that wait is free. This rule and `greedy`
follow the greedy schedulers of Zero Bubble Pipeline Parallelism (Qi et al., 2024) and of Pipeline Parallelism with
Controllable Memory (Qi et al., 2024). The climb, the bound and stages of unequal cost are Echelon's own. The search is
deterministic: it uses no random numbers and no clock, so the same input gives the same schedule.

Pure.
"""
