# A run that is killed in its eighth step.
import os, signal, sys, torch, halfstep
from tests.record.training import Net, train
def kill(step):
    if step == 8:
        os.kill(os.getpid(), signal.SIGKILL)
def slow(step):
    import time
    time.sleep(0.3)
    kill(step)
with halfstep.record(sys.argv[1], every=5):
    train(Net(), 20, scaler=halfstep.GradScaler("cpu"), before_step=slow)
