"""Parts of the pass `overlap_communication`: the graph as tasks, the list scheduler, the choice among its schedules."""
