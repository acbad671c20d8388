from rlix.pipeline.batch import collate


def test_prompt_and_answer_are_joined_padded_and_masked() -> None:
    rows = [([5, 6, 8], [False, False, True]), ([7, 9, 10, 11], [False, True, True, True])]
    batch = collate(rows, pad_id=0)
    assert batch["input_ids"].tolist() == [[5, 6, 8, 0], [7, 9, 10, 11]]
    # position t predicts token t + 1
    assert batch["mask"].tolist() == [[0, 1, 0], [1, 1, 1]]
