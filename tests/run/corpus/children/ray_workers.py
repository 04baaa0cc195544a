# Workers of ray are killed at the end, and lose their last steps.
import ray
import work

ray.init(num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
ray.get([ray.remote(work.train).remote(steps) for steps in (30, 40)])
