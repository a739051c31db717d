"""Averages what the clients have trained, and prints the accuracy of each round."""

from fedlane.flower import FedAvg, FedlaneGrid
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from digits.task import new_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    grid = FedlaneGrid(grid, context)
    config = context.run_config
    strategy = FedAvg(min_train_nodes=config["clients"], min_available_nodes=config["clients"])
    initial = ArrayRecord({name: Array(each) for name, each in new_model().items()})
    result = strategy.start(grid, initial, num_rounds=config["rounds"])
    for number, metrics in result.evaluate_metrics_clientapp.items():
        print(f"round {number}: accuracy {metrics['accuracy']:.3f}")
