"""Orders with everything that makes a join go wrong: unpaid ones, empty ones, customers without any, equal names."""

import random
import sqlite3
import sys

chance = random.Random(7)
database = sqlite3.connect(sys.argv[1])
database.executescript(
    """
    create table customers (id integer primary key, name text not null);
    create table orders (id integer primary key, customer_id integer not null references customers(id), status text not null);
    create table order_items (order_id integer not null references orders(id), quantity integer, unit_cents integer);
    """
)
names = ["Ada", "Grace", "Edsger", "Barbara", "Donald", "Ada", "Tony", "Niklaus", "Frances", "O'Neil, Pat"]
database.executemany("insert into customers values (?, ?)", enumerate(names, 1))
order = 0
for customer in range(1, len(names)):
    for _ in range(chance.randrange(5)):
        order += 1
        status = chance.choice(["paid", "paid", "open", "cancelled"])
        database.execute("insert into orders values (?, ?, ?)", (order, customer, status))
        for _ in range(chance.randrange(4)):
            item = (order, chance.randrange(1, 6), chance.randrange(99, 20000))
            database.execute("insert into order_items values (?, ?, ?)", item)
database.commit()
