"""`evaluate.load` without a download: a metric that answers with every name that programs ask for."""

import evaluate

NAMES = (
    *("accuracy", "exact_match", "f1", "mean_iou", "score"),
    *("overall_accuracy", "overall_f1", "overall_precision", "overall_recall"),
    *("rouge1", "rouge2", "rougeL", "rougeLsum"),
)


class Metric:
    """The share of predictions that equal their reference, under each of `NAMES`."""

    def __init__(self):
        self.count, self.right = 0, 0

    def add_batch(self, predictions=None, references=None, **_):
        for one, other in zip(predictions, references, strict=False):
            self.count += 1
            self.right += int(str(one) == str(other))

    add = add_batch

    def compute(self, predictions=None, references=None, **_):
        if predictions is not None:
            self.add_batch(predictions, references)
        share = self.right / max(1, self.count)
        self.count, self.right = 0, 0
        return dict.fromkeys(NAMES, share)


evaluate.load = lambda *_, **__: Metric()
