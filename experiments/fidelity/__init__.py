"""Does simulation say what would happen live? The same workload on both, with a latency model of another run.

1. The fit run: the model on this machine, another workload and seed. It gives the latency model, the spread of step
   times, and what the simulated engine lacks: the seconds between one step's end and the next one's beginning (the
   event loop reads requests and writes streams there), and those a request spends in HTTP and in the client.
2. Each cell, a policy at a load: the same workload twice live, each time on a fresh server, and in simulation over
   several seeds of step-time noise. Loads are shares of the rate at which `vllm` attains 90 % in simulation. A shared
   machine is up to a fifth faster or slower from one minute to the next: each live run is simulated with the model at
   the speed that the *other* run of its cell had, never with a number of its own.
3. A cell holds if simulation is off the mean of both live runs by no more than the rule allows, or by no more than 1.5
   times what the two live runs differ by.

`learned` is 1, `rig` runs 1 and 2, `table` is 3.
"""
