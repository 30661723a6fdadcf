-- update of one row: 1
UPDATE fenced_row SET n=?, fencing_token=?, fencing_key=? WHERE (fenced_row.id = ?) AND fenced_row.fencing_token <= ? AND (fenced_row.fencing_key = ? OR fenced_row.fencing_key = '');

-- update of one row of a class bound to one lock: 1
UPDATE bound_row SET n=?, fencing_token=? WHERE (bound_row.id = ?) AND bound_row.fencing_token <= ?;

-- update of one row, stale: 2
UPDATE fenced_row SET n=?, fencing_token=?, fencing_key=? WHERE (fenced_row.id = ?) AND fenced_row.fencing_token <= ? AND (fenced_row.fencing_key = ? OR fenced_row.fencing_key = '');
SELECT fenced_row.fencing_token, fenced_row.fencing_key FROM fenced_row WHERE (fenced_row.id = ?) LIMIT ? OFFSET ?;

-- update of one row, missing: 3
UPDATE fenced_row SET n=?, fencing_token=?, fencing_key=? WHERE (fenced_row.id = ? AND fenced_row.n = ?) AND fenced_row.fencing_token <= ? AND (fenced_row.fencing_key = ? OR fenced_row.fencing_key = '');
SELECT fenced_row.fencing_token, fenced_row.fencing_key FROM fenced_row WHERE (fenced_row.id = ? AND fenced_row.n = ?) LIMIT ? OFFSET ?;
SELECT fenced_row.fencing_token, fenced_row.fencing_key FROM fenced_row WHERE (fenced_row.id = ? AND fenced_row.n = ?) LIMIT ? OFFSET ?;

-- update of many rows: 5
BEGIN IMMEDIATE;
savepoint;
UPDATE fenced_row SET n=(fenced_row.n + ?), fencing_token=?, fencing_key=? WHERE (fenced_row.n < ?) AND fenced_row.fencing_token <= ? AND (fenced_row.fencing_key = ? OR fenced_row.fencing_key = '');
SELECT fenced_row.fencing_token, fenced_row.fencing_key FROM fenced_row WHERE (fenced_row.n < ?) AND (fenced_row.fencing_token > ? OR fenced_row.fencing_token IS NULL OR (fenced_row.fencing_key NOT IN (?, ?)) OR fenced_row.fencing_key IS NULL) LIMIT ? OFFSET ?;
release savepoint;

-- update of rows that a subquery names: 5
BEGIN IMMEDIATE;
savepoint;
SELECT fenced_row.fencing_token, fenced_row.fencing_key FROM fenced_row WHERE (fenced_row.id IN (SELECT fenced_row_1.id FROM fenced_row AS fenced_row_1 WHERE fenced_row_1.n < ?));
UPDATE fenced_row SET n=?, fencing_token=?, fencing_key=? WHERE (fenced_row.id IN (SELECT fenced_row_1.id FROM fenced_row AS fenced_row_1 WHERE fenced_row_1.n < ?)) AND fenced_row.fencing_token <= ? AND (fenced_row.fencing_key = ? OR fenced_row.fencing_key = '');
release savepoint;

-- update of many rows, stale: 5
BEGIN IMMEDIATE;
savepoint;
UPDATE fenced_row SET n=(fenced_row.n + ?), fencing_token=?, fencing_key=? WHERE (fenced_row.n < ?) AND fenced_row.fencing_token <= ? AND (fenced_row.fencing_key = ? OR fenced_row.fencing_key = '');
SELECT fenced_row.fencing_token, fenced_row.fencing_key FROM fenced_row WHERE (fenced_row.n < ?) AND (fenced_row.fencing_token > ? OR fenced_row.fencing_token IS NULL OR (fenced_row.fencing_key NOT IN (?, ?)) OR fenced_row.fencing_key IS NULL) LIMIT ? OFFSET ?;
rollback savepoint;

-- delete of one row: 1
DELETE FROM fenced_row WHERE (fenced_row.id = ?) AND fenced_row.fencing_token <= ? AND (fenced_row.fencing_key = ? OR fenced_row.fencing_key = '');

-- delete of many rows: 6
BEGIN IMMEDIATE;
savepoint;
DELETE FROM fenced_row WHERE fenced_row.fencing_token <= ? AND (fenced_row.fencing_key = ? OR fenced_row.fencing_key = '');
SELECT fenced_row.fencing_token, fenced_row.fencing_key FROM fenced_row WHERE fenced_row.fencing_token > ? OR fenced_row.fencing_token IS NULL OR (fenced_row.fencing_key NOT IN (?, ?)) OR fenced_row.fencing_key IS NULL LIMIT ? OFFSET ?;
release savepoint;
SELECT fenced_row.id FROM fenced_row WHERE fenced_row.id IN (?);

-- upsert of a row that is there: 1
UPDATE fenced_row SET n=?, fencing_token=?, fencing_key=? WHERE (fenced_row.id = ?) AND fenced_row.fencing_token <= ? AND (fenced_row.fencing_key = ? OR fenced_row.fencing_key = '');

-- upsert of a row that is not there: 6
UPDATE fenced_row SET n=?, fencing_token=?, fencing_key=? WHERE (fenced_row.id = ?) AND fenced_row.fencing_token <= ? AND (fenced_row.fencing_key = ? OR fenced_row.fencing_key = '');
SELECT fenced_row.fencing_token, fenced_row.fencing_key FROM fenced_row WHERE (fenced_row.id = ?) LIMIT ? OFFSET ?;
SELECT fenced_row.fencing_token, fenced_row.fencing_key FROM fenced_row WHERE (fenced_row.id = ?) LIMIT ? OFFSET ?;
savepoint;
INSERT INTO fenced_row (id, n, fencing_token, fencing_key) VALUES (?, ?, ?, ?);
release savepoint;

-- save of a loaded instance: 1
UPDATE fenced_row SET n=?, fencing_token=?, fencing_key=? WHERE (fenced_row.id = ?) AND fenced_row.fencing_token <= ? AND (fenced_row.fencing_key = ? OR fenced_row.fencing_key = '');

-- transaction: 3
BEGIN IMMEDIATE;
UPDATE volcano_locks_fence SET fencing_token=?, advanced_at=? WHERE volcano_locks_fence."key" = ? AND volcano_locks_fence.fencing_token <= ?;
INSERT INTO note (id, text) VALUES (?, ?);

-- transaction, stale: 3
BEGIN IMMEDIATE;
UPDATE volcano_locks_fence SET fencing_token=?, advanced_at=? WHERE volcano_locks_fence."key" = ? AND volcano_locks_fence.fencing_token <= ?;
SELECT volcano_locks_fence.fencing_token FROM volcano_locks_fence WHERE volcano_locks_fence."key" = ? LIMIT ? OFFSET ?;

