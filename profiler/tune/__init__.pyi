from .attention import tune_attention as tune_attention
from .tuning import default_jobs as default_jobs
from .tuning import tune as tune
